-- Find the tenant of a key.
-- KEYS: 1 tenants HASH, 2 tenant-keys HASH
-- ARGV: 1 hash of the key ('' if none was shown)
-- Returns {name ('' if no tenant has the key), whether any tenant was ever created (0 or 1)}.
return {redis.call('HGET', KEYS[2], ARGV[1]) or '', redis.call('EXISTS', KEYS[1])}
