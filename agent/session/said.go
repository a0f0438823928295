package session

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/internal/wakeup"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// statusesFile stores the statuses that the node reported for its own pods, in the format of the
// checkpoint.
const statusesFile = "statuses.checkpoint"

// reportedStatuses holds the last reported status of each pod with a restart policy other than
// Always, and of each pod with ephemeral containers. The control plane does not send these statuses
// back, and the container runtime's records do not survive a power failure. Without them, a node
// that boots and cannot reach a replica would run a finished pod or an ephemeral container again.
type reportedStatuses struct {
	changed wakeup.Signal

	mu    sync.Mutex
	byPod map[types.UID]*v1.Pod // objects with identity and status only; immutable
}

func newReportedStatuses() *reportedStatuses {
	return &reportedStatuses{changed: wakeup.New(), byPod: make(map[types.UID]*v1.Pod)}
}

func (s *reportedStatuses) setStatus(report *v1.Pod) {
	s.mu.Lock()
	s.byPod[report.UID] = report
	s.mu.Unlock()
	s.changed.Send()
}

// statusesToStore returns the reported statuses of pods that are assigned to the node and have
// containers that may end for good (restart policy other than Always, ephemeral containers). It
// drops the statuses of all other pods. assignedPod returns an assigned pod, or nil.
func (s *reportedStatuses) statusesToStore(assignedPod func(types.UID) *v1.Pod) (out []storedObject) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for uid, report := range s.byPod {
		p := assignedPod(uid)
		if p == nil || p.Spec.RestartPolicy == v1.RestartPolicyAlways && len(p.Spec.EphemeralContainers) == 0 {
			delete(s.byPod, uid)
			continue
		}
		out = append(out, storedObject{object: report})
	}
	return out
}

// runStatusCheckpoints writes statusesFile when a reported status has changed, at most once per
// Config.CheckpointEvery. It writes the file a last time when ctx ends.
func (s *Session) runStatusCheckpoints(ctx context.Context) error {
	written := -1 // number of statuses in the file; -1 = unknown
	for {
		select {
		case <-s.reports.statuses.changed:
		case <-ctx.Done():
			return ctx.Err()
		}
		began := time.Now()
		if s.hasAssignment() {
			written = s.writeStatuses(written)
		}
		if err := wait.Delay(ctx, max(s.cfg.CheckpointEvery, 20*time.Since(began))); err != nil {
			if s.hasAssignment() {
				s.writeStatuses(written)
			}
			return err
		}
	}
}

// writeStatuses writes statusesFile and returns the number of statuses in it, or -1 after an error.
// currentCount is the number of statuses that the file has. If it is 0 and there are no statuses to
// store, nothing is written.
func (s *Session) writeStatuses(currentCount int) int {
	objs := s.reports.statuses.statusesToStore(s.view.assignedPod)
	if len(objs) == 0 && currentCount == 0 {
		return 0
	}
	kinds := make(map[wireObject]string, len(objs))
	for _, h := range objs {
		kinds[h.object] = "Pod"
	}
	if err := writeRecording(filepath.Join(s.cfg.StateDir, statusesFile), &fleetv1.Welcome{}, objs, kinds, nil,
		0); err != nil {
		s.log.Error("the pod statuses could not be stored: after a power failure, a pod with restartPolicy Never "+
			"could run again", "err", err)
		return -1
	}
	return len(objs)
}

// loadStatuses copies the statuses in statusesFile into the pods of v.incoming, the assignment that
// is being loaded from the checkpoint.
func (s *Session) loadStatuses() error {
	msgs, err := readRecording(filepath.Join(s.cfg.StateDir, statusesFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, m := range msgs {
		for _, o := range m.GetObjects().GetUpserts() {
			obj, err := decodeObject(o)
			if err != nil {
				return err
			}
			if report, ok := obj.(*v1.Pod); ok {
				s.reports.statuses.setStatus(report)
				s.view.overlayStatus(report)
			}
		}
	}
	return nil
}

// assignedPod returns the pod with this UID that is assigned to the node, or nil.
func (v *view) assignedPod(uid types.UID) *v1.Pod {
	v.mu.RLock()
	defer v.mu.RUnlock()
	return v.current.pods[uid]
}

// overlayStatus copies the phase, start time and container statuses of report into the pod with the
// same UID in v.incoming, the full assignment that is being received. It does nothing if no
// assignment is being received or the assignment lacks the pod.
func (v *view) overlayStatus(report *v1.Pod) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.incoming == nil {
		return
	}
	k := objectKey{"Pod", report.Namespace, report.Name}
	h, ok := v.incoming.getObject(k)
	if !ok || h.object.GetUID() != report.UID {
		return
	}
	p, ok := h.object.(*v1.Pod)
	if !ok {
		return
	}
	p = p.DeepCopy()
	p.Status.Phase, p.Status.StartTime = report.Status.Phase, report.Status.StartTime
	p.Status.InitContainerStatuses = report.Status.InitContainerStatuses
	p.Status.ContainerStatuses = report.Status.ContainerStatuses
	p.Status.EphemeralContainerStatuses = report.Status.EphemeralContainerStatuses
	v.incoming.putObject(k, storedObject{h.revision, p})
}
