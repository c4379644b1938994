-- Replace the decisions on the windows of a verifier's sessions.
-- KEYS: 1 windows:<verifier> HASH
-- ARGV: 1 ms to keep them, then session id and decision for each session
-- Returns the number of decisions.
redis.call('DEL', KEYS[1])
for i = 2, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
if #ARGV > 1 then
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
return (#ARGV - 1) / 2
