-- What was decided of the windows of a verifier's sessions, in place of what was before.
-- KEYS: 1 windows:<verifier> HASH
-- ARGV: 1 ms to keep it, then session id and decision for each session
redis.call('DEL', KEYS[1])
for i = 2, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
if #ARGV > 1 then
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
return (#ARGV - 1) / 2
