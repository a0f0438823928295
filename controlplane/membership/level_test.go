package membership

import (
	"fmt"
	"strings"
	"testing"

	"keelson.dev/keelson/raftstore/replica"
)

func TestComputeLevel(t *testing.T) {
	reports := func(levels ...uint32) (out []replica.MemberLevel) {
		for i, l := range levels {
			out = append(out, replica.MemberLevel{ID: fmt.Sprint("cp", i+1), Level: l, Responded: true})
		}
		return out
	}
	silent := replica.MemberLevel{ID: "gone"}
	for _, c := range []struct {
		name               string
		current, supported uint32
		members            []replica.MemberLevel
		level              uint32
		blockers           string
	}{
		{"no members", 0, 1, nil, 0, ""},
		{"the only member supports the level", 0, 1, reports(1), 1, ""},
		{"all members support the level", 0, 1, reports(1, 1, 1), 1, ""},
		{"one member does not report a level", 0, 1, reports(1, 1, 0), 0, "cp3 supports levels up to 0"},
		{"one member does not respond", 0, 1, append(reports(1, 1), silent), 0, "gone does not answer"},
		{"several members prevent the level", 0, 2, append(reports(2, 1, 0), silent), 0,
			"cp2 supports levels up to 1, cp3 supports levels up to 0, gone does not answer"},
		{"the lowest level of all members", 0, 3, reports(3, 2, 3), 2, "cp2 supports levels up to 2"},
		{"the other members support more than the leader", 0, 1, reports(1, 5, 5), 1, ""},
		{"the level is already reached", 1, 1, reports(1, 1), 1, ""},
		{"the level does not fall: a member is older", 1, 2, reports(2, 0), 1, "cp2 supports levels up to 0"},
		{"the level does not fall: a member does not respond", 2, 2, append(reports(2), silent), 2,
			"gone does not answer"},
		{"the level does not fall: the leader is older", 2, 1, reports(1, 1), 2, ""},
		{"the first member does not respond", 0, 2, append([]replica.MemberLevel{silent}, reports(2, 2)...), 0,
			"gone does not answer"},
	} {
		if level, blockers := computeLevel(c.current, c.supported, c.members); level != c.level ||
			strings.Join(blockers, ", ") != c.blockers {
			t.Errorf("%s: %d %q, want %d %q", c.name, level, blockers, c.level, c.blockers)
		}
	}
}
