package node

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/session"
	"keelson.dev/keelson/internal/durable"
)

// What a node tells the control plane of attached volumes, as annotations of its facts.
const (
	// FencesAfterAnnotation is after how many seconds of silence pods with attached volumes are ended; "0" = never.
	FencesAfterAnnotation = "keelson.dev/fences-after"
	// VolumesInUseAnnotation says that status.volumesInUse is known: an empty list is as good as none on the wire.
	VolumesInUseAnnotation = "keelson.dev/volumes-in-use"
	// VolumesHeldAnnotation lists, in JSON, which of those the node may have mounted: for the others pods wait only. Where that would
	// be longer than mostHeld bytes it is agent.AllHeld.
	VolumesHeldAnnotation = "keelson.dev/volumes-held"
)

const mostHeld = 64 << 10 // all annotations of an object together may have 256 KiB

// fence ends pods with attached volumes when the control plane has not been heard for too long: it may have given the
// volumes to another node by then. Data on the node's own disk are no concern of it.
type fence struct {
	after   time.Duration // as configured; 0 = never
	heard   func() time.Duration
	clock   func() time.Duration // since the machine was started
	volumes agent.AttachedVolumes
	end     func(pod types.UID, message string)
	objects fenceObjects
	file    string // in the run folder: what was heard last while there were such pods, for the next agent
	reports string // in the run folder: the fence that the control plane may go by
	boot    string
	log     *slog.Logger

	last  atomic.Int64 // as heard, or as the file has it
	saved time.Duration

	mu       sync.Mutex
	report   string        // names the report that the control plane has not confirmed; "" = none
	recorded time.Duration // the shortest fence that earlier agents reported in this boot; 0 = none
	bound    time.Duration // a shorter fence by which the control plane may go; 0 = none
}

// lastHeard is what the file holds. Times are those since the machine was started, so that they are good for one boot.
type lastHeard struct {
	Version int           `json:"version"`
	Boot    string        `json:"boot"`
	At      time.Duration `json:"at"`
}

// fenceEvery is how often is looked, and saveEvery how often what was heard is written.
const (
	fenceEvery = time.Second
	saveEvery  = 2 * time.Second
)

func (f *fence) run(ctx context.Context) error {
	if f.after == 0 && f.unconfirmed() == "" {
		<-ctx.Done()
		return ctx.Err()
	}
	f.load()
	tick := time.NewTicker(fenceEvery)
	defer tick.Stop()
	for {
		if err := f.look(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// load begins with what the agent before this one heard. One that was away for long counts as silence, as it does for the
// control plane.
func (f *fence) load() {
	f.last.CompareAndSwap(0, int64(f.clock()))
	b, err := os.ReadFile(f.file)
	if err != nil {
		return // nobody had attached volumes
	}
	var l lastHeard
	if err := json.Unmarshal(b, &l); err != nil {
		f.log.Warn("when the control plane was heard last is not known", "file", f.file, "err", err)
		return
	}
	if l.Boot == f.boot && l.At <= f.clock() {
		f.last.Store(int64(l.At))
	}
}

// silence is for how long the control plane has not been heard.
func (f *fence) silence() time.Duration {
	at := max(time.Duration(f.last.Load()), f.heard())
	if at == 0 {
		return 0
	}
	return f.clock() - at
}

// closed says that it is too late for an attached volume to be mounted.
func (f *fence) closed() bool {
	after := f.current()
	return after > 0 && f.silence() >= after
}

func (f *fence) look() error {
	if err := f.confirm(); err != nil {
		return err
	}
	pods, err := f.volumes.PodsWithAttachedVolumes()
	if err != nil || len(pods) == 0 {
		return err
	}
	if h := f.heard(); h > time.Duration(f.last.Load()) {
		f.last.Store(int64(h))
	}
	if at := time.Duration(f.last.Load()); at >= f.saved+saveEvery || f.saved == 0 {
		b, err := json.Marshal(lastHeard{Version: 1, Boot: f.boot, At: at})
		if err == nil {
			err = durable.Write(f.file, b)
		}
		if err != nil {
			return fmt.Errorf("noting when the control plane was heard last: %w", err)
		}
		f.saved = at
	}
	if !f.closed() {
		return nil
	}
	for _, uid := range pods {
		f.end(uid, fmt.Sprintf("the control plane has not been heard for %s: other nodes may have the pod's attached volumes by now", f.current()))
	}
	return nil
}

// uses is what a node tells of its volumes.
type uses struct {
	names, held []v1.UniqueVolumeName // attached volumes, and those of them that may be mounted; names is nil = not known
	alone       []agent.HeldClaim     // claims that pods have for themselves
}

// tells adds what the control plane goes by.
func (f *fence) tells(n *v1.Node, u uses) {
	n.Annotations[FencesAfterAnnotation] = strconv.Itoa(int(f.after / time.Second))
	if report := f.unconfirmed(); report != "" {
		n.Annotations[FenceReportAnnotation] = report
	}
	if u.names != nil {
		n.Annotations[VolumesInUseAnnotation] = "told"
		n.Status.VolumesInUse = u.names
		n.Annotations[VolumesHeldAnnotation] = toldHeld(u.held)
		n.Annotations[agent.ClaimsHeldAnnotation] = toldHeld(u.alone)
	}
}

func toldHeld[T any](held []T) string {
	if len(held) == 0 {
		return "[]"
	}
	b, err := json.Marshal(held)
	if err != nil || len(b) > mostHeld {
		return agent.AllClaimsHeld
	}
	return string(b)
}

func fenceFile(runDir string) string { return filepath.Join(runDir, "control-plane-heard.json") }

// wire gives the fence what it works on. Before, it counts the control plane as heard.
func (f *fence) wire(s Session, volumes agent.AttachedVolumes, end func(types.UID, string), log *slog.Logger) {
	f.volumes, f.end, f.log, f.clock, f.objects = volumes, end, log, session.SinceBoot, s
	f.heard = func() time.Duration { return session.SinceBoot() }
	if h, ok := s.(interface{ Heard() time.Duration }); ok { // one that is passed in may be a control plane of its own
		f.heard = h.Heard
	}
}
