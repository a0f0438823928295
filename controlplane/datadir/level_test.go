package datadir

import (
	"errors"
	"strings"
	"testing"
)

func TestLevelRecord(t *testing.T) {
	for _, c := range []struct {
		raw   string
		level uint32
		bad   bool
	}{
		{`{"version":1,"level":1,"release":"v2"}`, 1, false},
		{`{"version":9,"level":7,"forms":{"pods":"K2"}}`, 7, false}, // of a later release
		{`{}`, 0, false},
		{``, 0, true},
		{`{"level":-1}`, 0, true},
		{`{"level":99999999999}`, 0, true},
		{`{"level":1,"x":"` + strings.Repeat("y", maxLevelBytes) + `"}`, 0, true},
	} {
		rec, err := DecodeLevel([]byte(c.raw))
		if rec.Level != c.level && !c.bad || (err != nil) != c.bad {
			t.Errorf("%.60s: %+v %v", c.raw, rec, err)
		}
	}
	rec := LevelRecord{Level: 2, Release: "v3"}
	if err := rec.CheckSupported(2); err != nil {
		t.Error(err)
	}
	want := "this release is too old for what is stored: the cluster stores forms of feature level 2, raised " +
		"by release v3, " +
		"and this release understands levels up to 1: start the release that the other replicas run, or one after it"
	if err := rec.CheckSupported(1); !errors.Is(err, ErrLevelTooHigh) || err.Error() != want {
		t.Errorf("%v", err)
	}
}
