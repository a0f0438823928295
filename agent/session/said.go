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
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// statusesFile holds what the node has said of its own pods, as a recording like the checkpoint's.
const statusesFile = "statuses.checkpoint"

// said is what the node has said last of pods that are not started again for ever. A control plane does not send that back, and the
// runtime's records do not survive a power cut: without it a node that boots before any replica answers would not know that
// such a pod has run.
type said struct {
	changed chan struct{} // capacity 1

	mu sync.Mutex
	of map[types.UID]*v1.Pod // statuses alone; immutable
}

func newSaid() *said {
	return &said{changed: make(chan struct{}, 1), of: make(map[types.UID]*v1.Pod)}
}

func (s *said) put(report *v1.Pod) {
	s.mu.Lock()
	s.of[report.UID] = report
	s.mu.Unlock()
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// worth are the statuses to be kept, of the pods that are here. The others are forgotten.
func (s *said) worth(pods func(types.UID) *v1.Pod) (out []held) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for uid, report := range s.of {
		if p := pods(uid); p == nil || p.Spec.RestartPolicy == v1.RestartPolicyAlways {
			delete(s.of, uid)
			continue
		}
		out = append(out, held{object: report})
	}
	return out
}

// saveSaid writes the file whenever something has changed, at most once per interval.
func (s *Session) saveSaid(ctx context.Context) error {
	written := -1 // not known
	for {
		select {
		case <-s.said.changed:
		case <-ctx.Done():
			return ctx.Err()
		}
		began := time.Now()
		if s.known() {
			written = s.writeSaid(written)
		}
		if err := wait.Delay(ctx, max(s.cfg.CheckpointEvery, 20*time.Since(began))); err != nil {
			if s.known() {
				s.writeSaid(written)
			}
			return err
		}
	}
}

// writeSaid returns how many statuses the file has; most nodes have no such pods, and no file is written for none.
func (s *Session) writeSaid(before int) int {
	objs := s.said.worth(s.view.pod)
	if len(objs) == 0 && before == 0 {
		return 0
	}
	kinds := make(map[wireObject]string, len(objs))
	for _, h := range objs {
		kinds[h.object] = "Pod"
	}
	if err := writeRecording(filepath.Join(s.cfg.StateDir, statusesFile), &fleetv1.Welcome{}, objs, kinds, nil, 0); err != nil {
		s.log.Error("what pods have done could not be written down: after a power cut one that restarts never might run again", "err", err)
		return -1
	}
	return len(objs)
}

// loadSaid puts what the node had said of its pods into an assignment that is being loaded.
func (s *Session) loadSaid() error {
	msgs, err := readRecording(filepath.Join(s.cfg.StateDir, statusesFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, m := range msgs {
		for _, o := range m.GetObjects().GetUpserts() {
			obj, err := decode(o)
			if err != nil {
				return err
			}
			if report, ok := obj.(*v1.Pod); ok {
				s.said.put(report)
				s.view.overlay(report)
			}
		}
	}
	return nil
}

// pod is a pod of the assignment; nil when there is none of that UID.
func (v *view) pod(uid types.UID) *v1.Pod {
	v.mu.RLock()
	defer v.mu.RUnlock()
	return v.now.pods[uid]
}

// overlay puts what the node said of a pod's containers into an assignment that is on its way.
func (v *view) overlay(report *v1.Pod) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.next == nil {
		return
	}
	k := objectKey{"Pod", report.Namespace, report.Name}
	h, ok := v.next.get(k)
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
	v.next.put(k, held{h.revision, p})
}
