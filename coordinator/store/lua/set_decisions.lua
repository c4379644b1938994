-- Replace the decisions on the windows of a verifier's sessions, unless another coordinator that is alive has replaced
-- them within its lease, or they were made from a later report.
-- KEYS: 1 windows:<verifier> HASH
-- ARGV: 1 ms to keep them, 2 id of the coordinator that decides, 3 ms for which nobody else replaces them while it
--       lives, 4 time of the report that they were made from (s), 5 decisions, 6 their directives behind this time, 7 ms
--       ago at which the coordinators that are alive were read, then their ids
-- Returns 1, or 0 if they were not replaced.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local known = redis.call('HMGET', KEYS[1], 'owner', 'until', 'reported')
if known[1] and tonumber(known[3]) > tonumber(ARGV[4]) then return 0 end
if known[1] and known[1] ~= ARGV[2] then
  -- Who has written since the list was read is alive, too, whether or not it is in the list.
  local alive = tonumber(known[2]) - tonumber(ARGV[3]) > now - tonumber(ARGV[7])
  for i = 8, #ARGV do
    alive = alive or ARGV[i] == known[1]
  end
  if alive and tonumber(known[2]) > now then return 0 end
end
redis.call('HSET', KEYS[1], 'owner', ARGV[2], 'until', string.format('%.0f', now + tonumber(ARGV[3])),
  'reported', ARGV[4], 'decisions', ARGV[5], 'directives', ARGV[6])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
