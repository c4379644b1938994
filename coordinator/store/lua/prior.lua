-- Add outcomes of sessions to the priors of their workload keys, and let these follow the sessions' times.
-- KEYS: prior HASHes
-- ARGV: 1 most outcomes of a prior, 2 factor by which a known time moves at most, 3 ms to keep a prior, 4 ms to keep one
--       that has fewer outcomes than it may have, then for each prior: outcomes of its sessions, and JSON of a list of
--       each one's draft ms and nodes per level (0 unknown)
-- Returns nothing.
local most, factor = tonumber(ARGV[1]), tonumber(ARGV[2])

local function followed(known, reported)
  if known <= 0 or reported <= 0 then return math.max(known, reported) end
  return math.max(known / factor, math.min(known * factor, reported))
end

for i, key in ipairs(KEYS) do
  local known = redis.call('HMGET', key, 'acceptance_history', 'draft_ms', 'nodes_per_level')
  local outcomes = string.sub((known[1] or '') .. ARGV[3 + 2 * i], -most)
  local draft_ms, nodes = tonumber(known[2] or '0'), tonumber(known[3] or '0')
  for _, told in ipairs(cjson.decode(ARGV[4 + 2 * i])) do
    draft_ms, nodes = followed(draft_ms, told[1]), followed(nodes, told[2])
  end
  redis.call('HSET', key, 'acceptance_history', outcomes, 'draft_ms', string.format('%.9g', draft_ms),
    'nodes_per_level', string.format('%.9g', nodes))
  redis.call('PEXPIRE', key, #outcomes < most and ARGV[4] or ARGV[3])
end
