package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"slices"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/client"
)

// Revisions stores the pod templates of StatefulSets or DaemonSets as ControllerRevisions.
type Revisions struct {
	*View[*appsv1.ControllerRevision]
	term *Term
}

// RevisionsOf returns the Revisions of an informer of ControllerRevisions, which must have
// ControllerIndex. It may be called only by Descriptor.Lead.
func RevisionsOf(t *Term, revisions cache.SharedIndexInformer) *Revisions {
	return &Revisions{View: ViewOf[*appsv1.ControllerRevision](t, revisions), term: t}
}

// RevisedObject is a StatefulSet or DaemonSet with its pod template and its collision count.
type RevisedObject struct {
	Owner      api.Object
	Ref        metav1.OwnerReference
	Selector   labels.Selector // revisions that do not match it are not part of the history
	Template   *corev1.PodTemplateSpec
	Collisions *int32 // status.collisionCount
}

// History is the revision history of a StatefulSet or DaemonSet.
type History struct {
	All        []*appsv1.ControllerRevision // all revisions, oldest first
	Update     *appsv1.ControllerRevision   // revision of the current template
	Collisions *int32
}

// FindByName returns the revision with the given name, or nil.
func (h History) FindByName(name string) *appsv1.ControllerRevision {
	for _, r := range h.All {
		if r.Name == name {
			return r
		}
	}
	return nil
}

// Sync makes the template of o its newest revision and returns the history. If an older revision
// has the same template, that revision becomes the newest and keeps its name.
func (v *Revisions) Sync(ctx context.Context, o RevisedObject) (History, error) {
	h := History{All: v.ownedRevisions(o.Owner, o.Selector), Collisions: o.Collisions}
	var next int64 = 1
	if n := len(h.All); n > 0 {
		next = h.All[n-1].Revision + 1
	}
	for i, r := range slices.Backward(h.All) {
		if !HoldsTemplate(r, o.Template) {
			continue
		}
		if i == len(h.All)-1 {
			h.Update = r
			return h, nil
		}
		again := r.DeepCopy()
		again.Revision = next
		again, err := client.Update(ctx, v.term.Client, again)
		if err != nil {
			return h, fmt.Errorf("making revision %s the newest: %w", storeKey(r), err)
		}
		v.RecordWrite(again)
		h.All, h.Update = append(slices.Delete(h.All, i, i+1), again), again
		return h, nil
	}
	return h, v.createRevision(ctx, o, &h, next)
}

// createRevision stores the template of o as a new revision with this number, and adds it to h. If
// a revision with another template has its name, it increments the collision count, which results
// in another name.
func (v *Revisions) createRevision(ctx context.Context, o RevisedObject, h *History, number int64) error {
	for {
		r := newRevision(o, number, h.Collisions)
		made, err := client.Create(ctx, v.term.Client, r)
		if apierrors.IsAlreadyExists(err) {
			have, err := client.Get[*appsv1.ControllerRevision](ctx, v.term.Client, r.Namespace, r.Name)
			if err != nil {
				return fmt.Errorf("reading revision %s, whose name is taken: %w", storeKey(r), err)
			}
			if metav1.IsControlledBy(have, o.Owner) && HoldsTemplate(have, o.Template) {
				v.RecordWrite(have)
				return RaceError("revision %s already exists", storeKey(have))
			}
			n := int32(1)
			if h.Collisions != nil {
				n = *h.Collisions + 1
			}
			h.Collisions = &n
			continue
		}
		if err != nil {
			return fmt.Errorf("creating revision %s: %w", storeKey(r), err)
		}
		v.RecordWrite(made)
		h.All, h.Update = append(h.All, made), made
		return nil
	}
}

// ownedRevisions returns the revisions of an owner that match its selector, oldest first.
func (v *Revisions) ownedRevisions(owner api.Object, selector labels.Selector) []*appsv1.ControllerRevision {
	all := slices.DeleteFunc(v.By(ControllerIndex, string(owner.GetUID())), func(r *appsv1.ControllerRevision) bool {
		return !selector.Matches(labels.Set(r.Labels))
	})
	slices.SortFunc(all, func(a, b *appsv1.ControllerRevision) int {
		return cmp.Or(cmp.Compare(a.Revision, b.Revision), a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
			cmp.Compare(a.Name, b.Name))
	})
	return all
}

// Truncate deletes old revisions in h, the oldest first, until at most limit are left. The revision
// of the current template, and revisions for which live returns true, are kept and do not count.
func (v *Revisions) Truncate(
	ctx context.Context, h History, live func(*appsv1.ControllerRevision) bool, limit int,
) error {
	var spare []*appsv1.ControllerRevision
	for _, r := range h.All {
		if r != h.Update && !live(r) && !v.IsDeleting(r) {
			spare = append(spare, r)
		}
	}
	for _, r := range spare[:max(0, len(spare)-limit)] {
		v.MarkDeleting(r)
		err := client.Delete[*appsv1.ControllerRevision](ctx, v.term.Client, r.Namespace, r.Name, DeleteOnlyUID(r))
		if err != nil && !apierrors.IsNotFound(err) {
			v.UnmarkDeleting(r)
			return fmt.Errorf("deleting old revision %s: %w", storeKey(r), err)
		}
	}
	return nil
}

// newRevision returns a ControllerRevision with the template of o. Its data is a patch that sets
// the template; `kubectl rollout undo` applies that patch.
func newRevision(o RevisedObject, number int64, collisions *int32) *appsv1.ControllerRevision {
	data := templatePatch(o.Template)
	h := fnv.New32a()
	_, _ = h.Write(data)
	if collisions != nil {
		_, _ = h.Write([]byte(strconv.Itoa(int(*collisions))))
	}
	hash := rand.SafeEncodeString(strconv.FormatUint(uint64(h.Sum32()), 10))
	r := &appsv1.ControllerRevision{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: o.Owner.GetNamespace(), Name: o.Owner.GetName() + "-" + hash,
			Labels: map[string]string{}, Annotations: map[string]string{},
			OwnerReferences: []metav1.OwnerReference{o.Ref},
		},
		Data:     runtime.RawExtension{Raw: data},
		Revision: number,
	}
	for k, v := range o.Template.Labels {
		r.Labels[k] = v
	}
	r.Labels[appsv1.ControllerRevisionHashLabelKey] = hash
	for k, v := range o.Owner.GetAnnotations() {
		if k != corev1.LastAppliedConfigAnnotation {
			r.Annotations[k] = v
		}
	}
	return r
}

// templatePatch returns the strategic merge patch that replaces the pod template of an object with
// t.
func templatePatch(t *corev1.PodTemplateSpec) []byte {
	var template map[string]any
	data, err := json.Marshal(t)
	if err == nil {
		err = json.Unmarshal(data, &template)
	}
	if err == nil {
		template["$patch"] = "replace"
		data, err = json.Marshal(map[string]any{"spec": map[string]any{"template": template}})
	}
	if err != nil { // a decoded template always encodes
		panic("engine: encoding a pod template: " + err.Error())
	}
	return data
}

// TemplateOf returns the pod template that revision r holds, with the defaults of this release.
// This release may have more fields than the release that stored r.
func TemplateOf(r *appsv1.ControllerRevision) (*corev1.PodTemplateSpec, error) {
	var patch struct {
		Spec struct {
			Template corev1.PodTemplateSpec `json:"template"`
		} `json:"spec"`
	}
	if err := json.Unmarshal(r.Data.Raw, &patch); err != nil {
		return nil, fmt.Errorf("reading the template of revision %s: %w", storeKey(r), err)
	}
	podspec.DefaultPodTemplate(&patch.Spec.Template)
	return &patch.Spec.Template, nil
}

// HoldsTemplate reports whether revision r holds template t. It compares the templates
// semantically, with defaults.
func HoldsTemplate(r *appsv1.ControllerRevision, t *corev1.PodTemplateSpec) bool {
	have, err := TemplateOf(r)
	return err == nil && equality.Semantic.DeepEqual(have, t)
}
