package node

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"keelson.dev/keelson/internal/durable"
)

// lastContact stores when the control plane last acknowledged a heartbeat, as time since boot.
// While pods have attached volumes, it also stores that time in a file, so that the next agent
// process can compute how long the node has been disconnected. lastTime is safe for concurrent use.
type lastContact struct {
	file string // in the run folder
	boot string // boot ID of the machine

	last  atomic.Int64  // time that this process received or loaded from the file
	saved time.Duration // time in the file
}

// lastAckRecord is the JSON content of lastContact.file. Times are since boot, so they are valid
// until the next reboot.
type lastAckRecord struct {
	Version int           `json:"version"`
	Boot    string        `json:"boot"`
	At      time.Duration `json:"at"`
}

// saveInterval is the time between two writes of the last acknowledgment.
const saveInterval = 2 * time.Second

func fenceFile(runDir string) string { return filepath.Join(runDir, "control-plane-heard.json") }

// loadRecord loads the time of the last acknowledgment that the previous agent process received.
// The time without an agent thus counts as disconnection, as it does for the control plane. If
// there is no valid record, it sets the time of the last acknowledgment to currentTime.
func (c *lastContact) loadRecord(currentTime time.Duration, log *slog.Logger) {
	c.last.CompareAndSwap(0, int64(currentTime))
	b, err := os.ReadFile(c.file)
	if err != nil {
		return // no pod had attached volumes
	}
	var l lastAckRecord
	if err := json.Unmarshal(b, &l); err != nil {
		log.Warn("the time of the last contact with the control plane could not be read", "file", c.file, "err", err)
		return
	}
	if l.Boot == c.boot && l.At <= currentTime {
		c.last.Store(int64(l.At))
	}
}

// lastTime returns the time of the last acknowledgment, or 0 if it is unknown.
func (c *lastContact) lastTime() time.Duration { return time.Duration(c.last.Load()) }

// recordAck records that this process received an acknowledgment at ackTime, which is a time since
// boot. It writes the file at most once per saveInterval.
func (c *lastContact) recordAck(ackTime time.Duration) error {
	if ackTime > c.lastTime() {
		c.last.Store(int64(ackTime))
	}
	last := c.lastTime()
	if last < c.saved+saveInterval && c.saved != 0 {
		return nil
	}
	b, err := json.Marshal(lastAckRecord{Version: 1, Boot: c.boot, At: last})
	if err == nil {
		err = durable.WriteIfChanged(c.file, b, durable.Intact)
	}
	if err != nil {
		return fmt.Errorf("storing the time of the last contact with the control plane: %w", err)
	}
	c.saved = last
	return nil
}
