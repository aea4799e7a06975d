"""First words of messages, so that what the target writes in the user's place is about many things.

Written for this. None of them is from a benchmark.
"""

_TEXT = """
Write a short story about|Write a poem about|Write a haiku|Write an email to my|Write a cover letter for
Write a review of|Write a speech for|Write a product description for|Write a dialogue between|Write a letter
Write a blog post|Write a song|Compose a|Draft a|Draft an|Help me write|Edit the following paragraph:
Rewrite this sentence|Correct the grammar|Create a slogan for|Create a list of|Create a table
Create a plan for|Describe the|Describe a|Describe how|Imagine you are|Imagine that|Pretend to be|You are a
You are an experienced|Act as a|Act as an|Suppose you|Take the role of|I want you to act as|As a doctor,
As a historian,|Roleplay as|Picture yourself as|What is|What are|What does|What would happen if
What's the difference between|What is the best way to|What should I|Why do|Why does|Why is|Why did|How do
How does|How can I|How many|How much|How to|How is|How was|Who was|Who is|When did|Where is|Which|Is it
Are there|Can you|Could you please|Do you|Does|Should I|Would|Tell me about|Tell me|Explain
Explain the concept of|Explain how|Explain why|Give me|Give an example of|Give three reasons|List|List five
Compare|Compare and contrast|Discuss|Summarize|Summarize the following text:|Summarize this article:|Outline
Analyze|If|If a train|If I have|If x|Given that|Given the following|Given a|A farmer has|A store sells
There are|Tom has|Maria|Solve|Solve for x:|Calculate|Find the|Find all|Prove that|Simplify|Evaluate|Convert
Estimate|The sum of|The area of|Write a Python function|Write a Python program|Write a function that
Write a JavaScript function|Write a SQL query|Write a C++ program|Write a bash script|Write code to
Implement a|Implement an algorithm|Fix this code:|Debug|Here is my code|What does this code do?|How do I sort
In Python, how|Optimize the following|Refactor|Write a unit test|Design a|Develop a|Build a|Generate
Translate the following|Translate this sentence into|Translate into English:|How do you say|Extract the
Extract all|Identify the|Identify|Classify|Classify the following|From the text below,|Read the passage below
Based on the following|Answer the question|Using the information|According to|Here is a paragraph:
Here are some reviews|Evaluate the following|Return the|Format|Sort the|Rank|Turn the following|Count|Name
Suggest|Recommend|Propose|Provide|In the field of|In physics,|In biology,|In chemistry,|In economics,
In literature,|In history,|During the|The theory of|Define|What caused|What were the|Photosynthesis
The French Revolution|The human|Climate change|Machine learning|I have|I am|I'm planning|I need|I need help
I want to|I would like|I am trying to|My|My friend|My boss|We are|hi|hello|hey|Please|please explain
please write|Thanks! Now|Let's|Consider|Assume|Choose|True or false:|Complete the|Continue|Fill in
"""
OPENINGS = tuple(_TEXT.strip().replace("\n", "|").split("|"))
