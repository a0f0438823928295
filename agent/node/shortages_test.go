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
	"keelson.dev/keelson/internal/wakeup"
)

// recordingAgent is a node on which agents run one after the other, in virtual time.
type recordingAgent struct {
	file string
	boot string
	born time.Time    // of the machine
	left atomic.Int64 // memory
	log  bytes.Buffer
	stop func()
}

// startAgent starts an agent in place of the previous one, and returns its first report.
func (f *recordingAgent) startAgent(t *testing.T) *pressureMonitor {
	f.stopAgent()
	cluster := fake.NewCluster()
	p := &pressureMonitor{log: slog.New(slog.NewTextHandler(&f.log, nil)), pods: newFakePods(0, 0), objects: cluster,
		events: newThresholdEvents("w1", cluster), changed: wakeup.New(),
		records: shortageRecords{file: f.file, boot: f.boot, clock: func() time.Duration { return time.Since(f.born) }},
		read: func() (out [eviction.Signals]eviction.Level) {
			out[eviction.Memory] = eviction.Level{Left: f.left.Load(), Floor: 100, Known: true}
			return out
		}}
	p.firstCheck(time.Now())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.monitorPressure(ctx) }()
	f.stop = func() {
		cancel()
		<-done
		f.stop = nil
	}
	return p
}

func (f *recordingAgent) stopAgent() {
	if f.stop != nil {
		f.stop()
	}
}

// A node has pressure for five minutes after its last shortage, whatever restarts happen meanwhile
// and however long no agent runs. After a reboot it starts without. F95
func TestPressureOutlivesTheAgent(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		f := &recordingAgent{file: filepath.Join(t.TempDir(), "run", "short.json"), boot: "b1",
			born: time.Now().Add(-time.Hour)}
		f.left.Store(500)
		defer f.stopAgent()
		says := func(when string, p *pressureMonitor, memory bool) {
			t.Helper()
			if p.hasPressure(eviction.Memory) != memory || p.hasPressure(eviction.Disk) {
				t.Errorf("%s: under pressure of memory %v, want %v; of disk %v", when, p.hasPressure(eviction.Memory),
					memory, p.hasPressure(eviction.Disk))
			}
		}
		p := f.startAgent(t)
		sleepAround(time.Minute)
		if _, err := os.Stat(f.file); !os.IsNotExist(err) {
			t.Errorf("nothing is short, and there is a record: %v", err)
		}
		f.left.Store(50)
		sleepAround(time.Minute)
		f.left.Store(500) // the shortage was ten seconds ago
		sleepAround(5 * time.Second)
		says("short a moment ago", p, true)
		says("the next agent", f.startAgent(t), true)
		sleepAround(2 * time.Minute)
		f.stopAgent()
		sleepAround(time.Minute)
		p = f.startAgent(t)
		says("after a minute without an agent", p, true)
		sleepAround(90 * time.Second)
		says("after 4 minutes and a half", p, true)
		sleepAround(30 * time.Second)
		says("after five minutes", p, false)
		says("the next agent after that", f.startAgent(t), false)
		f.left.Store(50)
		sleepAround(20 * time.Second)
		f.left.Store(500)
		f.stopAgent()
		f.boot, f.born = "b2", time.Now()
		says("after a reboot", f.startAgent(t), false)
		f.stopAgent()
		if strings.Contains(f.log.String(), f.file) {
			t.Errorf("it complains: %s", f.log.String())
		}
	})
}

// A record of a later release is read. An invalid one, one from the future and one that is too
// large are ignored and logged once. F95
func TestRecordOfShortages(t *testing.T) {
	for name, c := range map[string]struct {
		text        string
		holds, told bool
	}{
		"of a later release": {`{"version":7,"boot":"b1","short":{"memory.available":3590000000000,` +
			`"moon.available":1},"why":{"x":[1]}}`, true, false},
		"long ago":        {`{"version":1,"boot":"b1","short":{"memory.available":3290000000000}}`, false, false},
		"of the future":   {`{"version":1,"boot":"b1","short":{"memory.available":3700000000000}}`, false, false},
		"before the boot": {`{"version":1,"boot":"b1","short":{"memory.available":-1}}`, false, false},
		"of another boot": {`{"version":1,"boot":"b0","short":{"memory.available":3590000000000}}`, false, false},
		"empty":           {``, false, true},
		"nonsense":        {`{"version":1,"boot":"b1","short":["memory.available"]}`, false, true},
		"too long": {
			fmt.Sprintf(`{"version":1,"boot":"b1","short":{"memory.available":3590000000000},"x":%q}`,
				strings.Repeat("x", shortLimit)), false, true},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "short.json")
			if err := os.WriteFile(file, []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
			virtual.Test(t, func(t *testing.T) {
				f := &recordingAgent{file: file, boot: "b1", born: time.Now().Add(-time.Hour)}
				f.left.Store(500)
				defer f.stopAgent()
				p := f.startAgent(t)
				if p.hasPressure(eviction.Memory) != c.holds {
					t.Errorf("under pressure: %v", p.hasPressure(eviction.Memory))
				}
				sleepAround(time.Minute)
				f.stopAgent()
				if told := strings.Count(f.log.String(), file); told > 2 || told > 0 != c.told {
					t.Errorf("told: %s", f.log.String())
				}
			})
		})
	}
}
