-- A session is over: forget it and free its seats.
-- KEYS: 1 session:<id> HASH, 2 stats:<id> HASH, then seats:<verifier> ZSET of each verifier that may hold one
-- ARGV: 1 session id
for i = 3, #KEYS do
  redis.call('ZREM', KEYS[i], ARGV[1])
end
return redis.call('DEL', KEYS[1], KEYS[2])
