-- Replace a track's releases if they are still what the caller has read. Decisions are made outside, from what was
-- read: the second of two callers reads again. A caller whose reply was lost may send the same again.
-- KEYS: 1 releases HASH, 2 release-serial STRING
-- ARGV: 1 key of the track, 2 what was read ('' nothing), 3 the new releases, 4 whether the serial grows (0 or 1)
-- Returns the serial, or '' if the releases have changed meanwhile.
local known, serial = redis.call('HGET', KEYS[1], ARGV[1]) or '', redis.call('GET', KEYS[2])
if known ~= ARGV[2] then
  return known == ARGV[3] and serial or ''
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
if ARGV[4] == '1' or not serial then
  local time = redis.call('TIME')
  local micros = tonumber(time[1]) * 1000000 + tonumber(time[2])
  serial = string.format('%.0f', math.max(micros, tonumber(serial or '0') + 1))
  redis.call('SET', KEYS[2], serial)
end
return serial
