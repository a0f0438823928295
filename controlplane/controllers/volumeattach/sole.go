package volumeattach

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// A volume with access mode ReadWriteOncePod need not be attached to a node; for example, it may
// be a directory of a file server. Then only the scheduler ensures that one pod uses it, and the
// scheduler knows only the pods in the store. After a backup was restored, the store may lack the
// pod that uses the volume, on any node. A restore therefore sets annotation
// api.AnnotationUnconfirmed on such PersistentVolumes. While a volume has the annotation, a node
// mounts it only for a pod that already had it there. The annotation is removed when every node
// has reported the volumes of its pods, and the pods that are not in the store have stopped.

// singlePodVolume is a single-pod PersistentVolume with the pods and nodes that may use it.
type singlePodVolume struct {
	Volume             *corev1.PersistentVolume
	Users              []User         // pods of the volume's claim that are bound to a node and are not terminal
	Nodes              []*corev1.Node // nodes that may have the volume; may contain duplicates
	UnrecordedNodeWait time.Duration
}

// waitingReason returns why annotation api.AnnotationUnconfirmed cannot be removed from the volume
// yet, and because of which node. It returns "" if the annotation can be removed. A lost node does
// not count as fenced here, because an agent stops pods by itself only if they use attached
// volumes. Only the taint out-of-service or the deletion of the Node shows that nothing on the
// node uses the volume.
func (s singlePodVolume) waitingReason() string {
	first, why := "", ""
	for _, n := range s.Nodes {
		if api.IsOutOfService(n) || first != "" && first < n.Name {
			continue
		}
		switch pod, held := s.unknownHolder(n); {
		case api.IsUnconfirmed(n):
			first, why = n.Name,
				fmt.Sprintf("node %s has not reported since a backup was restored: one of its pods may use the volume "+
					"(if its machine no longer exists: kubectl delete node %[1]s)", n.Name)
		case api.IsJoining(n):
			first, why = n.Name,
				fmt.Sprintf("a backup was restored, and node %s, which has just joined, has not reported the volumes "+
					"of its pods yet", n.Name)
		case held:
			first, why = n.Name,
				fmt.Sprintf("node %s holds it for a deleted pod (uid %s): it is released when that pod has ended",
					n.Name, pod)
		}
	}
	if first == "" && s.UnrecordedNodeWait > 0 {
		return "a backup was restored: a pod of a node that joined after the backup may use the volume, and its " +
			"report is awaited for a limited time"
	}
	return why
}

// unknownHolder returns the UID of a pod that has the volume according to node n, although the
// store has no such pod on n. held reports whether such a pod exists. If n does not list all
// volumes of its pods, pod is "any" and held is true.
func (s singlePodVolume) unknownHolder(n *corev1.Node) (pod string, held bool) {
	list, all := api.HeldClaims(n)
	if all {
		return "any", true
	}
	for _, h := range list {
		mine := h.Volume == s.Volume.Name || s.Volume.Spec.ClaimRef != nil && s.Volume.Spec.ClaimRef.UID != "" &&
			h.Claim == s.Volume.Spec.ClaimRef.UID
		if mine && !slices.ContainsFunc(s.Users, func(u User) bool {
			return u.Pod.UID == h.Pod && u.Pod.Spec.NodeName == n.Name
		}) {
			return string(h.Pod), true
		}
	}
	return "", false
}

// ofSole returns the soleKey of a single-pod PersistentVolume with annotation
// api.AnnotationUnconfirmed. It returns nil for other PersistentVolumes.
func ofSole(v *corev1.PersistentVolume) []engine.Key {
	if api.IsSinglePod(v) && api.IsUnconfirmed(v) {
		return []engine.Key{{Kind: soleKey, Name: v.Name}}
	}
	return nil
}

// confirmSingleUse removes annotation api.AnnotationUnconfirmed from a single-pod PersistentVolume
// if only pods in the store can use the volume. Otherwise it records an event of the volume's pods
// and returns the delay until the next attempt.
func (r *reconciler) confirmSingleUse(ctx context.Context, name string) (time.Duration, error) {
	v, ok := engine.Cached[*corev1.PersistentVolume](r.informers.volumes, "", name)
	if !ok || len(ofSole(v)) == 0 {
		return 0, nil
	}
	s := singlePodVolume{Volume: v, Users: r.volumeUsers(v),
		UnrecordedNodeWait: r.wait.remainingWait(r.term.Now(), r.informers.nodes)}
	for _, use := range []string{unheard, joining, claiming} { // other nodes cannot have the volume
		s.Nodes = append(s.Nodes, engine.CachedBy[*corev1.Node](r.informers.nodes, byUse, use)...)
	}
	why := s.waitingReason()
	if why == "" {
		return 0, r.clearRestoreMark(ctx, v)
	}
	if _, _, attached := api.VolumeAttacher(v); !attached {
		// pods of an attached volume get the reason from recordEvents
		for _, u := range s.Users {
			r.events.recordOnce(u, corev1.EventTypeWarning, "FailedAttachVolume",
				fmt.Sprintf("volume %q is for a single pod, and %s", v.Name, why))
		}
	}
	return reportRetryDelay, nil
}

// clearRestoreMark removes annotation api.AnnotationUnconfirmed from a PersistentVolume.
func (r *reconciler) clearRestoreMark(ctx context.Context, v *corev1.PersistentVolume) error {
	_, err := client.Patch[*corev1.PersistentVolume](ctx, r.term.Client, "", v.Name, "", types.MergePatchType, unmark)
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("removing the restore mark from PersistentVolume %s: %w", v.Name, err)
	}
	return nil
}
