-- An operator ends a session for good: no report gives it a seat and no ticket a new place.
-- KEYS: 1 session:<id> HASH, 2 stats:<id> HASH, 3 closed:<id> STRING, then seats:<verifier> ZSET of each verifier that
--       may hold one
-- ARGV: 1 session id, 2 ms for which one of its tickets proves anything
for i = 4, #KEYS do
  redis.call('ZREM', KEYS[i], ARGV[1])
end
redis.call('SET', KEYS[3], 'killed', 'PX', ARGV[2])
return redis.call('DEL', KEYS[1], KEYS[2])
