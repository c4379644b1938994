-- Whose key this is.
-- KEYS: 1 tenants HASH, 2 tenant-keys HASH
-- ARGV: 1 hash of the key ('' where none was shown)
-- Returns {name ('' where it is nobody's), whether any tenant was ever created (0 or 1)}.
return {redis.call('HGET', KEYS[2], ARGV[1]) or '', redis.call('EXISTS', KEYS[1])}
