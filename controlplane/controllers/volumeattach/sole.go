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
	"keelson.dev/keelson/controlplane/controllers"
)

// A volume of access mode ReadWriteOncePod may be one that is not attached, as a folder of a file server is: then nobody but the scheduler keeps
// it to one pod, and it knows the pods of the store alone. One that was restored may lack the pod that has the volume, on whichever node. So
// such volumes have the mark of the restore, with which no node mounts them for a pod that did not have them there before, until every node has
// said which pods have what, and those have ended that are not in the store.

// sole is such a volume, with what is known of who has it.
type sole struct {
	Volume    *corev1.PersistentVolume
	Users     []User         // the pods of its claim that have a node and have not ended
	Nodes     []*corev1.Node // those that may have it, perhaps twice
	Strangers time.Duration
}

// waits says for which node a volume waits, and why; "" = for none any more. Only who says that a node is out of service, or deletes it, knows that
// nothing on it uses the volume: a node ends pods by itself for the sake of attached volumes alone.
func (s sole) waits() string {
	first, why := "", ""
	for _, n := range s.Nodes {
		if api.OutOfService(n) || first != "" && first < n.Name {
			continue
		}
		switch pod, held := s.holder(n); {
		case api.Unheard(n):
			first, why = n.Name, fmt.Sprintf("node %s has not been heard since a backup was restored: a pod of it may use it (if its machine is gone for good: kubectl delete node %[1]s)", n.Name)
		case api.Joining(n):
			first, why = n.Name, fmt.Sprintf("a backup was restored, and node %s, which has just joined, has not said yet what its pods use", n.Name)
		case held:
			first, why = n.Name, fmt.Sprintf("node %s has it for a pod that is not there any more (uid %s): it is free when that has ended", n.Name, pod)
		}
	}
	if first == "" && s.Strangers > 0 {
		return "a backup was restored: a pod of a node that joined after it was made may use it, and is waited for a while"
	}
	return why
}

// holder is a pod that has the volume by the word of its node, and is none of the pods of the store there.
func (s sole) holder(n *corev1.Node) (pod string, held bool) {
	list, all := api.ClaimsHeld(n)
	if all {
		return "any", true
	}
	for _, h := range list {
		mine := h.Volume == s.Volume.Name || s.Volume.Spec.ClaimRef != nil && s.Volume.Spec.ClaimRef.UID != "" && h.Claim == s.Volume.Spec.ClaimRef.UID
		if mine && !slices.ContainsFunc(s.Users, func(u User) bool { return u.Pod.UID == h.Pod && u.Pod.Spec.NodeName == n.Name }) {
			return string(h.Pod), true
		}
	}
	return "", false
}

// ofSole is the key of a volume that has the mark and is one pod's.
func ofSole(v *corev1.PersistentVolume) []controllers.Key {
	if api.SinglePod(v) && api.Unheard(v) {
		return []controllers.Key{{Kind: soleKey, Name: v.Name}}
	}
	return nil
}

// settleSole takes the mark off a volume that nobody has who is not in the store, and tells the pods that wait for that.
func (r *reconciler) settleSole(ctx context.Context, name string) (time.Duration, error) {
	v, ok := controllers.Cached[*corev1.PersistentVolume](r.volumes, "", name)
	if !ok || len(ofSole(v)) == 0 {
		return 0, nil
	}
	s := sole{Volume: v, Users: r.users(v), Strangers: r.wait.left(r.term.Now(), r.nodes)}
	for _, use := range []string{unheard, joining, claiming} { // of the others nobody waits for any
		s.Nodes = append(s.Nodes, controllers.CachedBy[*corev1.Node](r.nodes, byUse, use)...)
	}
	why := s.waits()
	if why == "" {
		return 0, r.settle(ctx, v)
	}
	if _, _, attached := api.Attachable(v); !attached { // else its pods are told of who has it by what attaches it
		for _, u := range s.Users {
			r.once(u, corev1.EventTypeWarning, "FailedAttachVolume", fmt.Sprintf("volume %q is one pod's, and %s", v.Name, why))
		}
	}
	return unheardAgain, nil
}

// settle takes the mark of a restore off a volume.
func (r *reconciler) settle(ctx context.Context, v *corev1.PersistentVolume) error {
	_, err := client.Patch[*corev1.PersistentVolume](ctx, r.term.Client, "", v.Name, "", types.MergePatchType, unmark)
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("taking the mark of a restore off persistentvolume %s: %w", v.Name, err)
	}
	return nil
}
