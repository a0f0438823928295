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

// Annotations about attached volumes in the Node object that the agent reports.
const (
	// FencesAfterAnnotation is the number of seconds of disconnection after which pods with
	// attached volumes are terminated; "0" = never.
	FencesAfterAnnotation = "keelson.dev/fences-after"
	// VolumesInUseAnnotation states that status.volumesInUse is known. Protobuf cannot distinguish
	// an empty list from a missing one.
	VolumesInUseAnnotation = "keelson.dev/volumes-in-use"
	// VolumesHeldAnnotation is a JSON list of the volumes in use that may be mounted; pods only
	// wait for the others. It is agent.AllClaimsHeld if the list is longer than maxHeldBytes.
	VolumesHeldAnnotation = "keelson.dev/volumes-held"
)

const maxHeldBytes = 64 << 10 // all annotations of an object are limited to 256 KiB

// fence terminates pods with attached volumes when the node has been disconnected from the control
// plane for a certain time, the fence time. After it, the control plane may attach the volumes to
// another node. Pods with only local data are not affected.
type fence struct {
	after    time.Duration // configured time; 0 = never
	lastAck  func() time.Duration
	clock    func() time.Duration // time since boot
	volumes  agent.AttachedVolumes
	fencePod func(pod types.UID, message string)
	objects  fenceObjects
	file     string // in the run folder: time of the last acknowledgment while pods had attached volumes, for the next agent
	reports  string // in the run folder: the fence that the control plane may rely on
	boot     string
	log      *slog.Logger

	last  atomic.Int64 // time of the last acknowledgment, received by this process or loaded from file
	saved time.Duration

	mu       sync.Mutex
	report   string        // name of the report that the control plane has not confirmed; "" = none
	recorded time.Duration // shortest fence that earlier agents reported since boot; 0 = none
	bound    time.Duration // a shorter fence that the control plane may rely on; 0 = none
}

// lastAckRecord is the JSON content of the file in fence.file. Times are since boot, so they are
// valid until the next reboot.
type lastAckRecord struct {
	Version int           `json:"version"`
	Boot    string        `json:"boot"`
	At      time.Duration `json:"at"`
}

// fenceInterval is the time between two checks of the fence. saveInterval is the time between two
// writes of the last acknowledgment.
const (
	fenceInterval = time.Second
	saveInterval  = 2 * time.Second
)

func (f *fence) runFence(ctx context.Context) error {
	if f.after == 0 && f.unconfirmedReport() == "" {
		<-ctx.Done()
		return ctx.Err()
	}
	f.loadLastAck()
	tick := time.NewTicker(fenceInterval)
	defer tick.Stop()
	for {
		if err := f.checkFence(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// loadLastAck loads the time of the last acknowledgment that the previous agent process received.
// Time without an agent thus counts as disconnection, as it does for the control plane.
func (f *fence) loadLastAck() {
	f.last.CompareAndSwap(0, int64(f.clock()))
	b, err := os.ReadFile(f.file)
	if err != nil {
		return // no pod had attached volumes
	}
	var l lastAckRecord
	if err := json.Unmarshal(b, &l); err != nil {
		f.log.Warn("the time of the last contact with the control plane could not be read", "file", f.file, "err", err)
		return
	}
	if l.Boot == f.boot && l.At <= f.clock() {
		f.last.Store(int64(l.At))
	}
}

// disconnectedFor returns the time since the control plane last acknowledged a heartbeat, or 0 if
// it is unknown.
func (f *fence) disconnectedFor() time.Duration {
	at := max(time.Duration(f.last.Load()), f.lastAck())
	if at == 0 {
		return 0
	}
	return f.clock() - at
}

// isFenced reports whether the fence time has passed, so that attached volumes must no longer be
// mounted.
func (f *fence) isFenced() bool {
	after := f.currentFence()
	return after > 0 && f.disconnectedFor() >= after
}

func (f *fence) checkFence() error {
	if err := f.confirmReport(); err != nil {
		return err
	}
	pods, err := f.volumes.PodsWithAttachedVolumes()
	if err != nil || len(pods) == 0 {
		return err
	}
	if h := f.lastAck(); h > time.Duration(f.last.Load()) {
		f.last.Store(int64(h))
	}
	if at := time.Duration(f.last.Load()); at >= f.saved+saveInterval || f.saved == 0 {
		b, err := json.Marshal(lastAckRecord{Version: 1, Boot: f.boot, At: at})
		if err == nil {
			err = durable.Write(f.file, b)
		}
		if err != nil {
			return fmt.Errorf("storing the time of the last contact with the control plane: %w", err)
		}
		f.saved = at
	}
	if !f.isFenced() {
		return nil
	}
	for _, uid := range pods {
		f.fencePod(uid, fmt.Sprintf("the node has been disconnected from the control plane for %s: the pod's attached volumes may be attached to other nodes", f.currentFence()))
	}
	return nil
}

// volumeUses is the node's report on the volumes and claims that its pods use.
type volumeUses struct {
	names, held     []v1.UniqueVolumeName // attached volumes in use, and those that may be mounted; names is nil if unknown
	exclusiveClaims []agent.HeldClaim     // ReadWriteOncePod claims in use
}

// annotate adds the fence time and the volumes in use to the annotations and the status of the Node
// n.
func (f *fence) annotate(n *v1.Node, u volumeUses) {
	n.Annotations[FencesAfterAnnotation] = strconv.Itoa(int(f.after / time.Second))
	if report := f.unconfirmedReport(); report != "" {
		n.Annotations[FenceReportAnnotation] = report
	}
	if u.names != nil {
		n.Annotations[VolumesInUseAnnotation] = "told"
		n.Status.VolumesInUse = u.names
		n.Annotations[VolumesHeldAnnotation] = heldAnnotation(u.held)
		n.Annotations[agent.ClaimsHeldAnnotation] = heldAnnotation(u.exclusiveClaims)
	}
}

func heldAnnotation[T any](held []T) string {
	if len(held) == 0 {
		return "[]"
	}
	b, err := json.Marshal(held)
	if err != nil || len(b) > maxHeldBytes {
		return agent.AllClaimsHeld
	}
	return string(b)
}

func fenceFile(runDir string) string { return filepath.Join(runDir, "control-plane-heard.json") }

// setDependencies sets the parts of the agent that the fence uses. end terminates a pod. Until it
// is called, the node counts as connected.
func (f *fence) setDependencies(s Session, volumes agent.AttachedVolumes, end func(types.UID, string), log *slog.Logger) {
	f.volumes, f.fencePod, f.log, f.clock, f.objects = volumes, end, log, session.SinceBoot, s
	f.lastAck = func() time.Duration { return session.SinceBoot() }
	if h, ok := s.(interface{ LastAck() time.Duration }); ok { // a session passed in Config may be part of a control plane in the same process
		f.lastAck = h.LastAck
	}
}
