// Package volumeattach decides which volumes are attached to which nodes. It creates and deletes
// the VolumeAttachments that the attacher of a CSI driver serves, and maintains
// status.volumesAttached of Nodes. It is also the attacher of drivers that have no attacher of
// their own (engine.IsServedByAgent) and of iSCSI volumes, where the node itself logs in after
// the attachment.
//
// The Node object coordinates mounting with detaching; both sides write it. A node first adds a
// volume to status.volumesInUse. It mounts only volumes that one revision of the Node has both
// there and in status.volumesAttached. Before an attachment is deleted, the volume is removed from
// status.volumesAttached, by a write that fails if the Node has changed.
package volumeattach

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/internal/keylock"
)

// Kinds of keys in the controller's queue.
//   - volumeKey is for a volume, with its attacher as namespace and its handle as name. Several
//     PersistentVolumes may refer to one volume. They share its key, so that two workers never
//     attach the volume to two nodes.
//   - attachmentKey is for a VolumeAttachment that the control plane serves.
//   - soleKey is for a ReadWriteOncePod PersistentVolume with annotation api.AnnotationUnconfirmed.
//     The restore of a backup sets the annotation. It is removed when it is certain that no pod
//     outside the restored store uses the volume.
const (
	volumeKey     = "volume"
	attachmentKey = "attachment"
	soleKey       = "sole"
)

// Names of informer indexes. byVolume indexes PersistentVolumes and VolumeAttachments by volume.
// byNode indexes VolumeAttachments by node. byUse indexes Nodes by the names of the volumes in
// their status.volumesInUse, and by the states below.
const (
	byVolume = "keelson.attachedVolume"
	byNode   = "keelson.attachedNode"
	byUse    = "keelson.volumeInUse"
)

// Values of index byUse that are not names of volumes but states of a Node. unheard: the node's
// agent has not reported its volumes since a backup was restored. joining: the agent has never
// reported its volumes. claiming: the node reports pods that use ReadWriteOncePod volumes.
const (
	unheard  = "unheard"
	joining  = "joining"
	claiming = "claiming"
)

// handleAnnotation on a VolumeAttachment stores the CSI handle of its volume, because the
// VolumeAttachment may outlive its PersistentVolume.
const handleAnnotation = "keelson.dev/volume-handle"

// New returns the attach/detach controller. calls is the client with which CSI drivers are called
// through the agents of the nodes. If calls is nil, the controller calls no driver, but still
// creates and deletes the VolumeAttachments that external attachers serve.
func New(d engine.Deps, calls api.NodeDrivers) *engine.Descriptor {
	r := &reconciler{silences: &fenceTracker{since: map[string]time.Time{}},
		informers: informers{
			claims:  client.Informer[*corev1.PersistentVolumeClaim](d.Informers),
			volumes: client.Informer[*corev1.PersistentVolume](d.Informers),
			pods:    client.Informer[*corev1.Pod](d.Informers), nodes: client.Informer[*corev1.Node](d.Informers),
			drivers:     client.Informer[*storagev1.CSIDriver](d.Informers),
			csiNodes:    client.Informer[*storagev1.CSINode](d.Informers),
			attachments: client.Informer[*storagev1.VolumeAttachment](d.Informers),
		}}
	i := r.informers
	engine.Index(i.pods, engine.PodClaimIndex, engine.PodClaimKeys)
	engine.Index(i.volumes, byVolume, func(o api.Object) []string {
		v, _ := o.(*corev1.PersistentVolume)
		return indexValues(keysOf(v))
	})
	engine.Index(i.attachments, byVolume, func(o api.Object) []string {
		a, ok := o.(*storagev1.VolumeAttachment)
		if handle, says := o.GetAnnotations()[handleAnnotation]; ok && says {
			return indexValues(keysFor(a.Spec.Attacher, handle))
		}
		return []string{volumeOf(o)}
	})
	engine.Index(i.attachments, byNode, func(o api.Object) []string {
		if a, ok := o.(*storagev1.VolumeAttachment); ok {
			return []string{a.Spec.NodeName}
		}
		return nil
	})
	engine.Index(i.nodes, byUse, func(o api.Object) (used []string) {
		if n, ok := o.(*corev1.Node); ok {
			for _, name := range n.Status.VolumesInUse {
				used = append(used, string(name))
			}
			if api.IsUnconfirmed(n) {
				used = append(used, unheard)
			}
			if api.IsJoining(n) {
				used = append(used, joining)
			}
			if list, all := api.HeldClaims(n); len(list) > 0 || all {
				used = append(used, claiming)
			}
		}
		return used
	})
	return &engine.Descriptor{
		Name: "attachdetach-controller", Workers: 8,
		Watches: i.attachmentWatches(r.silences),
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"persistentvolumes", "persistentvolumeclaims", "nodes"},
				Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"persistentvolumes"}, Verbs: []string{"patch"}},
			{APIGroups: []string{""}, Resources: []string{"nodes/status", "pods/status"}, Verbs: []string{"update"}},
			{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"delete", "get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get"}},
			{APIGroups: []string{"storage.k8s.io"}, Resources: []string{"csidrivers", "csinodes"},
				Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{"storage.k8s.io"}, Resources: []string{"volumeattachments"},
				Verbs: []string{"create", "delete", "get", "list", "update", "watch"}},
			{APIGroups: []string{"storage.k8s.io"}, Resources: []string{"volumeattachments/status"},
				Verbs: []string{"update"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			l := &reconciler{term: t, calls: t.Drivers(calls), silences: r.silences, informers: i,
				events:      eventLog{recorder: t.Events, last: map[types.UID]string{}},
				pods:        engine.ViewOf[*corev1.Pod](t, i.pods),
				attachments: engine.ViewOf[*storagev1.VolumeAttachment](t, i.attachments)}
			l.silences.clearSilences()
			return l.reconcileKey
		},
	}
}

// informers holds the informers from which the controller reads.
type informers struct {
	claims, volumes, pods, nodes, drivers, csiNodes, attachments cache.SharedIndexInformer
}

func (i informers) attachmentWatches(silences *fenceTracker) []engine.Watch {
	return []engine.Watch{
		engine.OnInformer(i.pods, func(c engine.Change[*corev1.Pod]) []engine.Key { return i.ofPod(c.New) }),
		engine.OnInformer(i.claims, func(c engine.Change[*corev1.PersistentVolumeClaim]) []engine.Key {
			return i.ofVolume(c.New.Spec.VolumeName)
		}),
		engine.OnInformer(i.volumes, func(c engine.Change[*corev1.PersistentVolume]) []engine.Key {
			return append(keysOf(c.New), ofSole(c.New)...)
		}),
		engine.OnInformer(i.attachments, func(c engine.Change[*storagev1.VolumeAttachment]) []engine.Key {
			return append(i.ofAttachment(c.New), engine.Key{Kind: attachmentKey, Name: c.New.Name})
		}),
		engine.OnInformer(i.nodes, func(c engine.Change[*corev1.Node]) []engine.Key {
			if c.Type != engine.Deleted {
				silences.observeNode(c.New)
			}
			if c.Type == engine.Updated && c.Old != nil && sameHost(c.Old, c.New) {
				return nil
			}
			var keys []engine.Key
			for _, a := range engine.CachedBy[*storagev1.VolumeAttachment](i.attachments, byNode, c.New.Name) {
				keys = append(keys, i.ofAttachment(a)...)
			}
			uses := c.New.Status.VolumesInUse
			if c.Old != nil {
				uses = slices.Concat(uses, c.Old.Status.VolumesInUse)
			}
			for _, name := range uses {
				if attacher, handle, ok := api.ParseAttachedVolumeName(name); ok {
					keys = append(keys, keysFor(attacher, handle)...)
				}
			}
			return keys
		}),
		engine.OnInformer(i.drivers, func(c engine.Change[*storagev1.CSIDriver]) []engine.Key {
			var keys []engine.Key
			for _, v := range engine.CachedAll[*corev1.PersistentVolume](i.volumes) {
				if v.Spec.CSI != nil && v.Spec.CSI.Driver == c.New.Name {
					keys = append(keys, keysOf(v)...)
				}
			}
			for _, a := range engine.CachedAll[*storagev1.VolumeAttachment](i.attachments) {
				if a.Spec.Attacher == c.New.Name {
					keys = append(keys, engine.Key{Kind: attachmentKey, Name: a.Name})
				}
			}
			return keys
		}),
		engine.OnInformer(i.csiNodes, func(c engine.Change[*storagev1.CSINode]) []engine.Key {
			var keys []engine.Key
			for _, a := range engine.CachedBy[*storagev1.VolumeAttachment](i.attachments, byNode, c.New.Name) {
				keys = append(keys, engine.Key{Kind: attachmentKey, Name: a.Name})
			}
			return keys
		}),
	}
}

// sameHost reports whether two versions of a Node are equal in all fields that affect attachments.
func sameHost(a, b *corev1.Node) bool {
	return isNodeLost(a) == isNodeLost(b) && api.IsOutOfService(a) == api.IsOutOfService(b) &&
		a.Annotations[api.AnnotationFencesAfter] == b.Annotations[api.AnnotationFencesAfter] &&
		a.Annotations[api.AnnotationVolumesHeld] == b.Annotations[api.AnnotationVolumesHeld] &&
		api.IsUnconfirmed(a) == api.IsUnconfirmed(b) && slices.Equal(a.Status.VolumesInUse, b.Status.VolumesInUse) &&
		slices.Equal(a.Status.VolumesAttached, b.Status.VolumesAttached)
}

// keysOf returns the volumeKey of the volume to which a PersistentVolume refers. It returns nil if
// volumes of that type are not attached to nodes.
func keysOf(v *corev1.PersistentVolume) []engine.Key {
	if attacher, handle, ok := api.VolumeAttacher(v); ok {
		return keysFor(attacher, handle)
	}
	return nil
}

func keysFor(attacher, handle string) []engine.Key {
	return []engine.Key{{Kind: volumeKey, Namespace: attacher, Name: handle}}
}

// indexValues returns the text forms of volume keys, which are the values of the index byVolume. No
// text form can equal the name of a PersistentVolume.
func indexValues(keys []engine.Key) (values []string) {
	for _, k := range keys {
		values = append(values, k.String())
	}
	return values
}

func (i informers) ofVolume(name string) []engine.Key {
	v, _ := engine.Cached[*corev1.PersistentVolume](i.volumes, "", name)
	return keysOf(v)
}

// ofAttachment returns the volumeKey of a VolumeAttachment's volume, even if the PersistentVolume
// no longer exists.
func (i informers) ofAttachment(a *storagev1.VolumeAttachment) []engine.Key {
	if handle, says := a.Annotations[handleAnnotation]; says {
		return keysFor(a.Spec.Attacher, handle)
	}
	return i.ofVolume(volumeOf(a))
}

// volumeOf returns the name of an attachment's PersistentVolume.
func volumeOf(o api.Object) string {
	if a, ok := o.(*storagev1.VolumeAttachment); ok && a.Spec.Source.PersistentVolumeName != nil {
		return *a.Spec.Source.PersistentVolumeName
	}
	return ""
}

// ofPod returns the volumeKeys of the volumes to which a scheduled pod's claims are bound.
func (i informers) ofPod(p *corev1.Pod) []engine.Key {
	if p.Spec.NodeName == "" {
		return nil
	}
	var keys []engine.Key
	for _, name := range engine.PodClaimKeys(p) {
		if c, ok := engine.Cached[*corev1.PersistentVolumeClaim](i.claims, p.Namespace,
			strings.TrimPrefix(name, p.Namespace+"/")); ok {
			keys = append(keys, i.ofVolume(c.Spec.VolumeName)...)
		}
	}
	return keys
}

// reconciler reconciles the controller's keys during one term of leadership. Every term has a new
// reconciler.
type reconciler struct {
	informers   informers
	term        *engine.Term
	calls       *engine.LeaderDrivers
	silences    *fenceTracker
	pods        *engine.View[*corev1.Pod]
	attachments *engine.View[*storagev1.VolumeAttachment]

	writing keylock.Locks // a Node's status is written by one worker at a time
	wait    unrecordedWait

	events eventLog
}

// eventLog records events about the volumes of pods. It skips an event that equals the last event
// of the same volume and pod. It is safe for concurrent use.
type eventLog struct {
	recorder record.EventRecorder
	mu       sync.Mutex
	last     map[types.UID]string // reason and message of the last event, by the UID of the pod and the volume
}

func (r *reconciler) reconcileKey(ctx context.Context, key engine.Key) (again time.Duration, err error) {
	switch key.Kind {
	case attachmentKey:
		again, err = r.serveAttachment(ctx, key.Name)
	case soleKey:
		again, err = r.confirmSingleUse(ctx, key.Name)
	default:
		again, err = r.reconcileVolume(ctx, key.Namespace, key.Name)
	}
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		err = engine.RaceError("%s: %w", key, err)
	}
	return again, err
}

// volumeState collects the input of PlanVolume for a volume from the caches.
func (r *reconciler) volumeState(attacher, handle string) State {
	in := State{Attacher: attacher, Handle: handle, Hosts: map[string]Host{}}
	at := indexValues(keysFor(attacher, handle))
	in.Volumes = engine.CachedBy[*corev1.PersistentVolume](r.informers.volumes, byVolume, at[0])
	for _, v := range in.Volumes {
		at = append(at, v.Name)
		in.Users = append(in.Users, r.volumeUsers(v)...)
	}
	in.Attachments = slices.DeleteFunc(r.attachments.By(byVolume, at...), func(a *storagev1.VolumeAttachment) bool {
		return !in.isOwnAttachment(a)
	})
	d, _ := engine.Cached[*storagev1.CSIDriver](r.informers.drivers, "", attacher)
	in.Required = attacher == api.ISCSIAttacher || api.RequiresAttach(d)
	now := r.term.Now()
	judge := func(node string) {
		if _, ok := in.Hosts[node]; !ok {
			in.Hosts[node] = r.assessNode(node, now)
		}
	}
	for _, a := range in.Attachments {
		judge(a.Spec.NodeName)
	}
	for _, u := range in.Users {
		judge(u.Pod.Spec.NodeName)
	}
	uses := []string{string(in.uniqueVolumeName()), unheard}
	if slices.ContainsFunc(in.Volumes, func(v *corev1.PersistentVolume) bool { return api.IsUnconfirmed(v) }) {
		in.UnrecordedNodeWait = r.wait.remainingWait(now, r.informers.nodes)
		uses = append(uses, joining)
	}
	for _, use := range uses {
		for _, n := range engine.CachedBy[*corev1.Node](r.informers.nodes, byUse, use) {
			judge(n.Name)
		}
	}
	return in
}

// isOwnAttachment reports whether an attachment belongs to this volume and has the name that this
// controller gives to attachments. The controller ignores all other attachments.
func (in State) isOwnAttachment(a *storagev1.VolumeAttachment) bool {
	return a.Spec.Attacher == in.Attacher && a.Name == api.AttachmentName(in.Handle, in.Attacher, a.Spec.NodeName)
}

// volumeUsers returns the scheduled pods that are not terminal and use the claim of a
// PersistentVolume.
func (r *reconciler) volumeUsers(v *corev1.PersistentVolume) (users []User) {
	ref := v.Spec.ClaimRef
	if ref == nil {
		return nil
	}
	c, ok := engine.Cached[*corev1.PersistentVolumeClaim](r.informers.claims, ref.Namespace, ref.Name)
	if !ok || c.Spec.VolumeName != v.Name || ref.UID != "" && ref.UID != c.UID {
		return nil
	}
	for _, p := range r.pods.By(engine.PodClaimIndex, ref.Namespace+"/"+ref.Name) {
		if p.Spec.NodeName != "" && !api.IsPodTerminal(p) {
			users = append(users, User{p, v})
		}
	}
	return users
}

// reconcileVolume performs the writes that PlanVolume returns for one volume. It returns the delay
// until the next attempt, or 0 if only a change of an object requires one.
func (r *reconciler) reconcileVolume(ctx context.Context, attacher, handle string) (time.Duration, error) {
	in := r.volumeState(attacher, handle)
	step := PlanVolume(in)
	for _, p := range step.Remove {
		if err := r.removePod(ctx, p); err != nil {
			return 0, err
		}
	}
	for _, a := range step.Detach {
		if err := r.deleteAttachment(ctx, in, a); err != nil {
			return 0, err
		}
	}
	if err := r.keepFences(ctx, in); err != nil {
		return 0, err
	}
	for _, node := range step.Listed {
		if err := r.writeAttachedList(ctx, node, in.uniqueVolumeName(), true, r.keepsFence(in, node)); err != nil {
			return 0, fmt.Errorf("recording volume %s as attached to node %s: %w", in.uniqueVolumeName(), node, err)
		}
	}
	for _, u := range step.Attach {
		if err := r.createAttachment(ctx, in, u); err != nil {
			return 0, err
		}
	}
	for _, v := range step.Settled {
		if err := r.clearRestoreMark(ctx, v); err != nil {
			return 0, err
		}
	}
	r.recordEvents(in, step)
	return step.Again, nil
}

// createAttachment creates the VolumeAttachment of a volume for the node of pod u.
func (r *reconciler) createAttachment(ctx context.Context, in State, u User) error {
	v, node := u.Volume, u.Pod.Spec.NodeName
	a := &storagev1.VolumeAttachment{
		ObjectMeta: metav1.ObjectMeta{Name: api.AttachmentName(in.Handle, in.Attacher, node),
			Annotations: map[string]string{handleAnnotation: in.Handle}},
		Spec: storagev1.VolumeAttachmentSpec{Attacher: in.Attacher, NodeName: node,
			Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &v.Name}}}
	if n := in.Hosts[node].Node; n != nil {
		a, _ = api.RecordFenceDelay(a, n)
	}
	a, err := client.Create(ctx, r.term.Client, a)
	if err != nil {
		return fmt.Errorf("attaching volume %s to node %s: %w", v.Name, node, err)
	}
	r.attachments.RecordWrite(a)
	return nil
}

// deleteAttachment removes a volume from the Node's status.volumesAttached and then deletes the
// VolumeAttachment. It fails if the node has started to use the volume again and is not fenced.
func (r *reconciler) deleteAttachment(ctx context.Context, in State, a *storagev1.VolumeAttachment) error {
	node, name := a.Spec.NodeName, in.uniqueVolumeName()
	err := r.writeAttachedList(ctx, node, name, false, func(n *corev1.Node) error {
		// true if the node waits for a volume that it never had in its status: the deletion takes
		// nothing away
		waits := false
		if holds, told := api.MayHoldVolume(n, name); told && !holds {
			waits = !isVolumeAttached(n, name)
		}
		if slices.Contains(n.Status.VolumesInUse, name) && !waits &&
			!r.silences.assessNode(node, n, r.term.Now()).Fenced {
			return engine.RaceError("node %s uses volume %s again", node, name)
		}
		return nil
	})
	if err == nil {
		err = client.Delete[*storagev1.VolumeAttachment](ctx, r.term.Client, "", a.Name, engine.DeleteOnlyUID(a))
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("detaching volume %s from node %s: %w", volumeOf(a), node, err)
	}
	return nil
}

// writeAttachedList adds a volume to a Node's status.volumesAttached if attached is true, or
// removes it otherwise. check may reject the current Node with an error. The write fails if the
// Node has changed since check accepted it.
func (r *reconciler) writeAttachedList(
	ctx context.Context, node string, name corev1.UniqueVolumeName, attached bool, check func(*corev1.Node) error,
) error {
	if n, ok := engine.Cached[*corev1.Node](r.informers.nodes, "", node); ok && attached && isVolumeAttached(n, name) {
		return nil
	}
	defer r.writing.Lock(node)()
	n, err := client.Get[*corev1.Node](ctx, r.term.Client, "", node)
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return err
	case check != nil:
		if err := check(n); err != nil {
			return err
		}
	}
	if isVolumeAttached(n, name) == attached {
		return nil
	}
	next := n.DeepCopy()
	if attached {
		next.Status.VolumesAttached = append(next.Status.VolumesAttached, corev1.AttachedVolume{Name: name})
	} else {
		next.Status.VolumesAttached = slices.DeleteFunc(next.Status.VolumesAttached,
			func(v corev1.AttachedVolume) bool { return v.Name == name })
	}
	_, err = client.UpdateStatus(ctx, r.term.Client, next)
	return err
}

func isVolumeAttached(n *corev1.Node, name corev1.UniqueVolumeName) bool {
	return slices.ContainsFunc(n.Status.VolumesAttached, func(v corev1.AttachedVolume) bool { return v.Name == name })
}

// recordEvents records the results of attachments as events of the pods. It does not repeat an
// event.
func (r *reconciler) recordEvents(in State, step Step) {
	refused := map[types.UID]string{}
	for _, x := range step.Refused {
		refused[x.Pod.UID] = x.Message
	}
	at := map[string]*storagev1.VolumeAttachment{}
	for _, a := range in.Attachments {
		at[a.Spec.NodeName] = a
	}
	for _, u := range in.Users {
		a := at[u.Pod.Spec.NodeName]
		switch why := refused[u.Pod.UID]; {
		case why != "":
			r.events.recordOnce(u, corev1.EventTypeWarning, "FailedAttachVolume", why)
		case a != nil && a.Status.Attached:
			r.events.recordOnce(u, corev1.EventTypeNormal, "SuccessfulAttachVolume",
				fmt.Sprintf("AttachVolume.Attach succeeded for volume %q", u.Volume.Name))
		case a != nil && a.Status.AttachError != nil:
			r.events.recordOnce(u, corev1.EventTypeWarning, "FailedAttachVolume",
				fmt.Sprintf("AttachVolume.Attach failed for volume %q : %s", u.Volume.Name,
					a.Status.AttachError.Message))
		}
	}
}

// maxLastEvents is the maximum number of entries in eventLog.last.
const maxLastEvents = 50_000

// recordOnce records an event of a pod's volume unless the last event was the same. A new
// leader does not repeat the success event of a running pod.
func (l *eventLog) recordOnce(u User, kind, reason, message string) {
	p, key := u.Pod, types.UID(string(u.Pod.UID)+"/"+u.Volume.Name)
	l.mu.Lock()
	same := l.last[key] == reason+message
	_, before := l.last[key]
	if len(l.last) >= maxLastEvents {
		clear(l.last)
	}
	l.last[key] = reason + message
	l.mu.Unlock()
	if same || !before && kind == corev1.EventTypeNormal && p.Status.Phase == corev1.PodRunning {
		return
	}
	l.recorder.Event(p, kind, reason, message)
}
