package memory

import (
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"testing"
)

func TestAvailable(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		want  int64
	}{
		"no groups": {map[string]string{}, 8 << 30},
		"no limit": {map[string]string{"proc/self/cgroup": "0::/a/b\n",
			"sys/fs/cgroup/a/b/memory.max": "max\n"}, 8 << 30},
		"own limit": {map[string]string{"proc/self/cgroup": "0::/a/b\n",
			"sys/fs/cgroup/a/b/memory.max": "1073741824\n"}, 1 << 30},
		"a limit above": {map[string]string{"proc/self/cgroup": "1:name=x:/y\n0::/a/b\n",
			"sys/fs/cgroup/a/memory.max": "2147483648\n", "sys/fs/cgroup/a/b/memory.max": "max"}, 2 << 30},
		"more than there is": {map[string]string{"proc/self/cgroup": "0::/\n",
			"sys/fs/cgroup/memory.max": "99999999999999\n"}, 8 << 30},
	} {
		root := t.TempDir()
		c.files["proc/meminfo"] = "MemFree: 1 kB\nMemTotal:        8388608 kB\n"
		for path, text := range c.files {
			if err := os.MkdirAll(filepath.Join(root, filepath.Dir(path)), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(root, path), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := availableUnder(root); err != nil || got != c.want {
			t.Errorf("%s: %d, %v, want %d", name, got, err, c.want)
		}
	}
	if n, err := Available(); err != nil || n < 64<<20 {
		t.Errorf("this machine has %d bytes, %v", n, err)
	}
}

func TestLimit(t *testing.T) {
	before := debug.SetMemoryLimit(-1)
	defer debug.SetMemoryLimit(before)
	t.Setenv("GOMEMLIMIT", "")
	SetLimit(10 << 30)
	if got, ok := CurrentLimit(); !ok || got != 9<<30 {
		t.Errorf("the limit is %d", got)
	}
}

// Setting the current score requires no privilege.
func TestShield(t *testing.T) {
	raw, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		t.Fatal(err)
	}
	now, err := strconv.Atoi(string(raw[:len(raw)-1]))
	if err != nil {
		t.Fatal(err)
	}
	if err := SetOOMScore(now); err != nil {
		t.Error(err)
	}
	if err := SetOOMScore(-2000); err == nil {
		t.Error("an invalid score was set")
	}
}
