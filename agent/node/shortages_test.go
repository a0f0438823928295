package node

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"keelson.dev/keelson/agent/eviction"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/internal/virtual"
)

// forgetful is a node of which agents look one after the other, in virtual time.
type forgetful struct {
	file string
	boot string
	born time.Time    // of the machine
	left atomic.Int64 // memory
	log  bytes.Buffer
	stop func()
}

// start runs an agent in place of the one before, and returns what it says first.
func (f *forgetful) start(t *testing.T) *pressure {
	f.end()
	cluster := fake.NewCluster()
	p := &pressure{node: "w1", log: slog.New(slog.NewTextHandler(&f.log, nil)), pods: newCrowd(0, 0), objects: cluster, reporter: cluster, told: map[eviction.Signal]time.Time{}, changed: make(chan struct{}, 1),
		hold: shortages{file: f.file, boot: f.boot, clock: func() time.Duration { return time.Since(f.born) }},
		read: func() (out [eviction.Signals]eviction.Level) {
			out[eviction.Memory] = eviction.Level{Left: f.left.Load(), Floor: 100, Known: true}
			return out
		}}
	p.begin(time.Now())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.run(ctx) }()
	f.stop = func() {
		cancel()
		<-done
		f.stop = nil
	}
	return p
}

func (f *forgetful) end() {
	if f.stop != nil {
		f.stop()
	}
}

// A node is called under pressure for five minutes after it was short last, however often its agent is started meanwhile and
// however long there is none; after a reboot it is looked at anew. F95
func TestPressureOutlivesTheAgent(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		f := &forgetful{file: filepath.Join(t.TempDir(), "run", "short.json"), boot: "b1", born: time.Now().Add(-time.Hour)}
		f.left.Store(500)
		defer f.end()
		says := func(when string, p *pressure, memory bool) {
			t.Helper()
			if p.holds(eviction.Memory) != memory || p.holds(eviction.Disk) {
				t.Errorf("%s: under pressure of memory %v, want %v; of disk %v", when, p.holds(eviction.Memory), memory, p.holds(eviction.Disk))
			}
		}
		p := f.start(t)
		sleep(time.Minute)
		if _, err := os.Stat(f.file); !os.IsNotExist(err) {
			t.Errorf("nothing is short, and there is a record: %v", err)
		}
		f.left.Store(50)
		sleep(time.Minute)
		f.left.Store(500) // ten seconds ago it was short
		sleep(5 * time.Second)
		says("short a moment ago", p, true)
		says("the next agent", f.start(t), true)
		sleep(2 * time.Minute)
		f.end()
		sleep(time.Minute)
		p = f.start(t)
		says("after a minute without an agent", p, true)
		sleep(90 * time.Second)
		says("after 4 minutes and a half", p, true)
		sleep(30 * time.Second)
		says("after five minutes", p, false)
		says("the next agent after that", f.start(t), false)
		f.left.Store(50)
		sleep(20 * time.Second)
		f.left.Store(500)
		f.end()
		f.boot, f.born = "b2", time.Now()
		says("after a reboot", f.start(t), false)
		f.end()
		if strings.Contains(f.log.String(), f.file) {
			t.Errorf("it complains: %s", f.log.String())
		}
	})
}

// A record of a later release is understood; one that says nonsense, is of the future or much too long counts for nothing, and that is
// told once. F95
func TestRecordOfShortages(t *testing.T) {
	for name, c := range map[string]struct {
		text        string
		holds, told bool
	}{
		"of a later release": {`{"version":7,"boot":"b1","short":{"memory.available":3590000000000,"moon.available":1},"why":{"x":[1]}}`, true, false},
		"long ago":           {`{"version":1,"boot":"b1","short":{"memory.available":3290000000000}}`, false, false},
		"of the future":      {`{"version":1,"boot":"b1","short":{"memory.available":3700000000000}}`, false, false},
		"before the boot":    {`{"version":1,"boot":"b1","short":{"memory.available":-1}}`, false, false},
		"of another boot":    {`{"version":1,"boot":"b0","short":{"memory.available":3590000000000}}`, false, false},
		"empty":              {``, false, true},
		"nonsense":           {`{"version":1,"boot":"b1","short":["memory.available"]}`, false, true},
		"too long":           {fmt.Sprintf(`{"version":1,"boot":"b1","short":{"memory.available":3590000000000},"x":%q}`, strings.Repeat("x", shortLimit)), false, true},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "short.json")
			if err := os.WriteFile(file, []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
			virtual.Test(t, func(t *testing.T) {
				f := &forgetful{file: file, boot: "b1", born: time.Now().Add(-time.Hour)}
				f.left.Store(500)
				defer f.end()
				p := f.start(t)
				if p.holds(eviction.Memory) != c.holds {
					t.Errorf("under pressure: %v", p.holds(eviction.Memory))
				}
				sleep(time.Minute)
				f.end()
				if told := strings.Count(f.log.String(), file); told > 2 || told > 0 != c.told {
					t.Errorf("told: %s", f.log.String())
				}
			})
		})
	}
}
