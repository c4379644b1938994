-- Add outcomes of sessions to the priors of their workload keys, and let these follow the sessions' times.
-- KEYS: prior HASH of each session, in the order of the sessions
-- ARGV: 1 most outcomes of a prior, 2 factor by which a known time moves at most, 3 ms to keep a prior, 4 ms to keep one
--       that has fewer outcomes than it may have, then for each session: its outcomes, draft ms and nodes per level (0
--       unknown)
-- Returns nothing.
local most, factor = tonumber(ARGV[1]), tonumber(ARGV[2])

local function followed(known, reported)
  if known <= 0 or reported <= 0 then return math.max(known, reported) end
  return math.max(known / factor, math.min(known * factor, reported))
end

for i, key in ipairs(KEYS) do
  local told = 2 + 3 * i
  local known = redis.call('HMGET', key, 'acceptance_history', 'draft_ms', 'nodes_per_level')
  local outcomes = string.sub((known[1] or '') .. ARGV[told], -most)
  local times = {}
  for j = 1, 2 do
    times[j] = string.format('%.9g', followed(tonumber(known[j + 1] or '0'), tonumber(ARGV[told + j])))
  end
  redis.call('HSET', key, 'acceptance_history', outcomes, 'draft_ms', times[1], 'nodes_per_level', times[2])
  redis.call('PEXPIRE', key, #outcomes < most and ARGV[4] or ARGV[3])
end
