package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"keelson.dev/keelson/agent/eviction"
	"keelson.dev/keelson/agent/session"
	"keelson.dev/keelson/internal/durable"
)

// shortageRecords records in a file when the node last had a shortage of each resource, so that
// pressure conditions persist across restarts of the agent. The file is in the run folder, which
// has free space even while the disk is full. The zero value records nothing.
type shortageRecords struct {
	file, boot string
	clock      func() time.Duration // time since boot
	failed     error                // last error, which was logged if reported is true
	reported   bool
}

// shortageFile is the JSON content of the file of shortageRecords, by eviction signal. Times are
// since boot, so they are valid until the next reboot even if the clock is set. A later release may
// add fields, but the meaning of a field never changes.
type shortageFile struct {
	Version int                      `json:"version"`
	Boot    string                   `json:"boot"`
	Short   map[string]time.Duration `json:"short"`
}

const (
	shortVersion = 1
	shortLimit   = 64 << 10 // maximum size of the file in bytes
)

func newShortages(runDir, boot string) shortageRecords {
	return shortageRecords{file: filepath.Join(runDir, "short.json"), boot: boot, clock: session.SinceBoot}
}

// loadState returns the state with the shortages that the previous agent process recorded.
func (s *shortageRecords) loadState(state eviction.State, now time.Time) eviction.State {
	if s.file == "" {
		return state
	}
	l, err := s.readFile()
	if s.failed = err; err != nil || l.Boot != s.boot {
		return state
	}
	at := s.clock()
	for i := range eviction.Signals {
		if was, ok := l.Short[i.String()]; ok && was >= 0 && was <= at {
			state = state.WithShortage(i, now.Add(was-at))
		}
	}
	return state
}

func (s *shortageRecords) readFile() (l shortageFile, err error) {
	f, err := os.Open(s.file)
	if errors.Is(err, fs.ErrNotExist) {
		return l, nil // there was no shortage
	}
	var raw []byte
	if err == nil {
		defer f.Close()
		raw, err = io.ReadAll(io.LimitReader(f, shortLimit+1))
	}
	if err == nil && len(raw) > shortLimit {
		err = fmt.Errorf("%s has more than %d bytes", s.file, shortLimit)
	}
	if err == nil {
		err = json.Unmarshal(raw, &l)
	}
	if err != nil {
		return shortageFile{}, fmt.Errorf("reading the stored resource shortages: %w; the file may be removed", err)
	}
	return l, nil
}

// saveState writes the last shortages in state to the file if the reading r has a shortage. An
// error is logged once until a write succeeds.
func (s *shortageRecords) saveState(state eviction.State, r eviction.Reading, log *slog.Logger) {
	if s.file == "" {
		return
	}
	short := false
	l := shortageFile{Version: shortVersion, Boot: s.boot, Short: map[string]time.Duration{}}
	for i := range eviction.Signals {
		short = short || r.Levels[i].IsShort()
		if at := state.LastShort(i); !at.IsZero() {
			l.Short[i.String()] = s.clock() - r.At.Sub(at)
		}
	}
	if short {
		b, err := json.Marshal(l)
		if err == nil {
			err = durable.WriteIfChanged(s.file, b, durable.Intact)
		}
		if s.failed = err; err == nil {
			s.reported = false
		}
	}
	if s.failed != nil && !s.reported {
		s.reported = true
		log.Warn("the pressure of the node could not be stored or read: after a restart of the agent, its conditions "+
			"may end early", "file", s.file, "err", s.failed)
	}
}
