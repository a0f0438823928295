package node

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/session"
)

// Annotations about attached volumes in the Node object that the agent reports.
const (
	// FencesAfterAnnotation is the fence time in seconds: after this time of disconnection, pods
	// with attached volumes are terminated; "0" = never.
	FencesAfterAnnotation = "keelson.dev/fences-after"
	// VolumesInUseAnnotation is set if status.volumesInUse is known. Protobuf cannot distinguish an
	// empty list from a missing list.
	VolumesInUseAnnotation = "keelson.dev/volumes-in-use"
	// VolumesHeldAnnotation is a JSON list of those volumes in use that may be mounted; for the
	// other volumes, pods wait. It is agent.AllClaimsHeld if the list is longer than maxHeldBytes.
	VolumesHeldAnnotation = "keelson.dev/volumes-held"
)

const maxHeldBytes = 64 << 10 // all annotations of an object are limited to 256 KiB

// fence terminates pods with attached volumes when the node has been disconnected from the control
// plane for a certain time, the fence time. After the fence time, the control plane may attach the
// volumes to another node. Pods with only local data are not affected.
type fence struct {
	after    time.Duration // configured time; 0 = never
	lastAck  func() time.Duration
	clock    func() time.Duration // time since boot
	volumes  agent.AttachedVolumes
	fencePod func(pod types.UID, message string)
	objects  fenceObjects
	contact  lastContact
	reports  string // file in the run folder with the fence time that the control plane may rely on
	boot     string
	log      *slog.Logger

	mu       sync.Mutex
	report   string        // name of the fence report that the control plane has not confirmed; "" = none
	recorded time.Duration // shortest fence time that earlier agents reported since boot; 0 = none
	// a shorter fence time that is still in effect, because the control plane may rely on it; 0 =
	// none
	bound time.Duration
}

// fenceInterval is the time between two checks of the fence.
const fenceInterval = time.Second

func (f *fence) runFence(ctx context.Context) error {
	if f.after == 0 && f.unconfirmedReport() == "" {
		<-ctx.Done()
		return ctx.Err()
	}
	f.contact.loadRecord(f.clock(), f.log)
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

// disconnectedFor returns the time since the control plane last acknowledged a heartbeat, or 0 if
// that time is unknown.
func (f *fence) disconnectedFor() time.Duration {
	at := max(f.contact.lastTime(), f.lastAck())
	if at == 0 {
		return 0
	}
	return f.clock() - at
}

// isFenced reports whether the node has been disconnected for the fence time. If so, attached
// volumes must not be mounted any longer.
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
	if err := f.contact.recordAck(f.lastAck()); err != nil {
		return err
	}
	if !f.isFenced() {
		return nil
	}
	for _, uid := range pods {
		f.fencePod(uid,
			fmt.Sprintf("the node has been disconnected from the control plane for %s: the pod's attached volumes may "+
				"be attached to other nodes", f.currentFence()))
	}
	return nil
}

// volumeUses is the node's report about the volumes and claims that its pods use.
type volumeUses struct {
	// attached volumes in use, and those that may be mounted; names is nil if unknown
	names, held     []v1.UniqueVolumeName
	exclusiveClaims []agent.HeldClaim // ReadWriteOncePod claims in use
}

// annotate adds the fence time and the volumes in use to the node's annotations and status.
func (f *fence) annotate(node *v1.Node, uses volumeUses) {
	node.Annotations[FencesAfterAnnotation] = strconv.Itoa(int(f.after / time.Second))
	if report := f.unconfirmedReport(); report != "" {
		node.Annotations[FenceReportAnnotation] = report
	}
	if uses.names != nil {
		node.Annotations[VolumesInUseAnnotation] = "told"
		node.Status.VolumesInUse = uses.names
		node.Annotations[VolumesHeldAnnotation] = heldAnnotation(uses.held)
		node.Annotations[agent.ClaimsHeldAnnotation] = heldAnnotation(uses.exclusiveClaims)
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

// setDependencies sets the parts of the agent that the fence uses. terminate terminates a pod.
// Before setDependencies is called, the node counts as connected.
func (f *fence) setDependencies(
	s Session, volumes agent.AttachedVolumes, terminate func(types.UID, string), log *slog.Logger,
) {
	f.volumes, f.fencePod, f.log, f.clock, f.objects = volumes, terminate, log, session.SinceBoot, s
	f.lastAck = func() time.Duration { return session.SinceBoot() }
	if h, ok := s.(interface{ LastAck() time.Duration }); ok {
		// a session passed in Config may be part of a control plane in the same process
		f.lastAck = h.LastAck
	}
}
