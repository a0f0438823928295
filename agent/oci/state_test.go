package oci

import "testing"

// TestSandboxTable checks the whole transition table; "-" is a rejected transition. F98
func TestSandboxTable(t *testing.T) {
	inputs := []SandboxInput{SandboxBuilt, SandboxRan, SandboxFailed, SandboxLost, SandboxStop, SandboxRemove,
		SandboxCreate, SandboxRecover}
	table := map[SandboxState][]SandboxState{
		//               built            ran           failed          lost             stop             remove          create        recover
		SandboxCreating: {SandboxPrepared, "-", SandboxRemoved, SandboxNotReady, SandboxNotReady, SandboxRemoved, "-",
			SandboxRemoved},
		SandboxPrepared: {"-", SandboxReady, SandboxRemoved, SandboxNotReady, SandboxNotReady, SandboxRemoved,
			SandboxPrepared, SandboxRemoved},
		SandboxReady:    {"-", "-", "-", SandboxNotReady, SandboxNotReady, SandboxRemoved, SandboxReady, SandboxReady},
		SandboxNotReady: {"-", "-", "-", SandboxNotReady, SandboxNotReady, SandboxRemoved, "-", SandboxNotReady},
		SandboxRemoved:  {"-", "-", SandboxRemoved, SandboxRemoved, SandboxRemoved, SandboxRemoved, "-", "-"},
	}
	for state, row := range table {
		for i, want := range row {
			got, err := state.NextState(inputs[i])
			switch {
			case want == "-" && (err == nil || got != state):
				t.Errorf("%s + %s = %s, %v; must be refused and change nothing", state, inputs[i], got, err)
			case want != "-" && (err != nil || got != want):
				t.Errorf("%s + %s = %s, %v; want %s", state, inputs[i], got, err, want)
			}
		}
	}
}

func TestReason(t *testing.T) {
	for _, c := range []struct {
		code int32
		oom  bool
		want string
	}{{0, false, "Completed"}, {0, true, "Completed"}, {137, true, "OOMKilled"}, {137, false, "Error"},
		{1, false, "Error"}} {
		if got := terminationReason(c.code, c.oom); got != c.want {
			t.Errorf("reason(%d, %v) = %s, want %s", c.code, c.oom, got, c.want)
		}
	}
}

func TestExitRecord(t *testing.T) {
	e, err := parseExitRecord([]byte("137 20 10 oom\n"))
	if err != nil || e != (exitRecord{Code: 137, Finished: 20, Started: 10, OOM: true}) {
		t.Errorf("%+v, %v", e, err)
	}
	// Fields added by a later release are skipped.
	for text, oom := range map[string]bool{"137 20 10\n": false, "137 20 10 new=1": false,
		"137 20 10 oom new=1\nmore": true} {
		if e, err := parseExitRecord([]byte(text)); err != nil ||
			e != (exitRecord{Code: 137, Finished: 20, Started: 10, OOM: oom}) {
			t.Errorf("%q: %+v, %v", text, e, err)
		}
	}
	for _, bad := range []string{"", "1", "1 2", "x 2 3", "99999999999 1 1"} {
		if e, err := parseExitRecord([]byte(bad)); err == nil {
			t.Errorf("%q was read as %+v", bad, e)
		}
	}
}
