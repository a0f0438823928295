package volumesnapshot

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	groups "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	snap "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
)

// naming is what snapshots and groups of them call the same things.
type naming struct {
	kind           string // that of their classes and contents begins with it
	thing          string // in sentences
	field, ref     string // of spec: which names a class, and by which a content says whose it is
	handle         string // of a content's spec: what somebody took without the cluster
	claims, of     string // what a content is made for, and whose driver is meant
	owner, content string // variables in the names of Secrets

	// Annotations of classes and contents, the finalizer of contents, parameters of classes.
	defaultClass, secretName, secretNamespace, beingCreated, finalizer, nameParam, namespaceParam string
}

var (
	ofSnapshots = naming{kind: "VolumeSnapshot", thing: "snapshot", field: "volumeSnapshotClassName", ref: "volumeSnapshotRef", handle: "source.snapshotHandle",
		claims: "a claim", of: "the volume of the claim is",
		owner: "volumesnapshot", content: "volumesnapshotcontent", defaultClass: defaultClass, secretName: secretName, secretNamespace: secretNamespace,
		beingCreated: beingCreated, finalizer: contentFinalizer, nameParam: secretNameParam, namespaceParam: secretNamespaceParam}
	ofGroups = naming{kind: "VolumeGroupSnapshot", thing: "group of snapshots", field: "volumeGroupSnapshotClassName", ref: "volumeGroupSnapshotRef",
		handle: "source.groupSnapshotHandles", claims: "claims", of: "the volumes of the claims are",
		owner: "volumegroupsnapshot", content: "volumegroupsnapshotcontent", defaultClass: groupDefaultClass, secretName: groupSecretName, secretNamespace: groupSecretNamespace,
		beingCreated: groupBeingCreated, finalizer: groupContentFinalizer, nameParam: groupSecretNameParam, namespaceParam: groupSecretNamespaceParam}
)

// event is the reason of an event: what happens to one of either kind.
func (n naming) event(what string) string { return strings.TrimPrefix(n.kind, "Volume") + what }

// class is one of either kind.
type class struct {
	name, driver            string
	policy                  snap.DeletionPolicy
	annotations, parameters map[string]string
}

func classOf(c *snap.VolumeSnapshotClass) class {
	return class{c.Name, c.Driver, c.DeletionPolicy, c.Annotations, c.Parameters}
}

func groupClassOf(c *groups.VolumeGroupSnapshotClass) class {
	return class{c.Name, c.Driver, c.DeletionPolicy, c.Annotations, c.Parameters}
}

// classFor finds the class that is named, or the driver's default.
func (n naming) classFor(named *string, driver string, all []class) (class, error) {
	if named != nil && *named != "" {
		i := slices.IndexFunc(all, func(c class) bool { return c.name == *named })
		switch {
		case i < 0:
			return class{}, fmt.Errorf("%sClass %q does not exist", n.kind, *named)
		case all[i].driver != driver:
			return class{}, fmt.Errorf("%sClass %q is of CSI driver %s, and %s of %s: name a class of that driver", n.kind, *named, all[i].driver, n.of, driver)
		}
		return all[i], nil
	}
	var defaults []class
	var names []string
	for _, c := range all {
		if c.driver == driver && c.annotations[n.defaultClass] == "true" {
			defaults, names = append(defaults, c), append(names, c.name)
		}
	}
	switch len(defaults) {
	case 0:
		return class{}, fmt.Errorf("no %sClass is the default of CSI driver %s: name one in spec.%s, or annotate one with %s=true", n.kind, driver, n.field, n.defaultClass)
	case 1:
		return defaults[0], nil
	}
	slices.Sort(names)
	return class{}, fmt.Errorf("%sClasses %s are all the default of CSI driver %s: name one in spec.%s, or leave the annotation to one", n.kind, strings.Join(names, ", "), driver, n.field)
}

// chosen is the class by which something of a driver's volumes is taken.
func chosen[T any](ctx context.Context, r *reconciler, n naming, named *string, driver string, of func(*T) class) (class, error) {
	list, err := controllers.ListTyped[T](ctx, r.term.Client, r.kind(n.kind+"Class"), "")
	if err != nil {
		return class{}, err
	}
	var all []class
	for _, one := range list {
		all = append(all, of(one.Typed))
	}
	return n.classFor(named, driver, all)
}

// withClass has an owner name the class that was chosen, unless it names one.
func withClass[T any](ctx context.Context, r *reconciler, n naming, s controllers.Stored[T], named *string, c class) (controllers.Stored[T], error) {
	if named != nil {
		return s, nil
	}
	return changed(ctx, r, s, func(o *custom.Object) { o.Content["spec"].(map[string]any)[n.field] = c.name })
}

// parameters are those of the class that a content names, as the driver is told of them.
func parameters[T any](ctx context.Context, r *reconciler, n naming, name *string, of func(*T) class) (map[string]string, error) {
	if name == nil {
		return nil, nil
	}
	c, err := controllers.GetTyped[T](ctx, r.term.Client, r.kind(n.kind+"Class"), "", *name)
	if err != nil {
		return nil, fmt.Errorf("%sClass %s: %w", n.kind, *name, err)
	}
	return n.told(of(c.Typed))
}

// told are the parameters that the driver is told of. What begins with csi.storage.k8s.io/ is for who calls it.
func (n naming) told(c class) (map[string]string, error) {
	out := map[string]string{}
	for _, k := range slices.Sorted(maps.Keys(c.parameters)) {
		switch {
		case !strings.HasPrefix(k, reserved):
			out[k] = c.parameters[k]
		case k != n.nameParam && k != n.namespaceParam:
			return nil, fmt.Errorf("parameter %s of %sClass %s is not served for drivers that the agents serve: leave it out", k, n.kind, c.name)
		}
	}
	return out, nil
}

// note puts on a content that is made for an owner which Secret its driver is given, and from which nodes it is reached.
func (n naming) note(content *metav1.ObjectMeta, c class, owner metav1.Object, from *corev1.VolumeNodeAffinity) error {
	name, namespace := c.parameters[n.nameParam], c.parameters[n.namespaceParam]
	if (name == "") != (namespace == "") {
		return fmt.Errorf("%sClass %s has one of the parameters %s and %s: both belong together", n.kind, c.name, n.nameParam, n.namespaceParam)
	}
	fill := strings.NewReplacer("${"+n.owner+".name}", owner.GetName(), "${"+n.owner+".namespace}", owner.GetNamespace(), "${"+n.content+".name}", content.Name)
	name, namespace = fill.Replace(name), fill.Replace(namespace)
	if strings.Contains(name+namespace, "${") {
		return fmt.Errorf("%sClass %s: its Secret %s/%s has a variable that there is not", n.kind, c.name, namespace, name)
	}
	if name != "" {
		metav1.SetMetaDataAnnotation(content, n.secretName, name)
		metav1.SetMetaDataAnnotation(content, n.secretNamespace, namespace)
	}
	if from == nil {
		return nil
	}
	text, err := json.Marshal(from)
	if err != nil {
		return err
	}
	metav1.SetMetaDataAnnotation(content, controllers.ReachedFromAnnotation, string(text))
	return nil
}

// belongs says why a content that an owner names is not its own. made is one that was made for claims, and not for who names it.
func (n naming) belongs(owner, content metav1.Object, ref corev1.ObjectReference, made bool) error {
	c := n.kind + "Content " + content.GetName()
	switch {
	case ref.Namespace != owner.GetNamespace() || ref.Name != owner.GetName():
		return fmt.Errorf("%s is for %s %s/%s", c, n.kind, ref.Namespace, ref.Name)
	case ref.UID != "" && ref.UID != owner.GetUID():
		return fmt.Errorf("%s belongs to an earlier %s of this name", c, n.kind)
	case made:
		return fmt.Errorf("%s is one that was made for %s, and has no %s", c, n.claims, n.handle)
	case content.GetDeletionTimestamp() != nil:
		return fmt.Errorf("%s is being deleted", c)
	}
	return nil
}

// contentNamed reads a content; nil when there is none.
func contentNamed[T any](ctx context.Context, r *reconciler, n naming, name string) (*controllers.Stored[T], error) {
	c, err := controllers.GetTyped[T](ctx, r.term.Client, r.kind(n.kind+"Content"), "", name)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return &c, err
}

// bind has a content be the owner's alone, and stay until its data are seen to.
func bind[T any](ctx context.Context, r *reconciler, n naming, c controllers.Stored[T], ref corev1.ObjectReference, owner types.UID) (controllers.Stored[T], error) {
	if ref.UID != "" && slices.Contains(c.Object.Finalizers, n.finalizer) {
		return c, nil
	}
	return changed(ctx, r, c, func(o *custom.Object) {
		o.Content["spec"].(map[string]any)[n.ref].(map[string]any)["uid"] = string(owner)
		if !slices.Contains(o.Finalizers, n.finalizer) {
			o.Finalizers = append(o.Finalizers, n.finalizer)
		}
	})
}

// volumeOf is the volume of a claim that something is to be taken of.
func (r *reconciler) volumeOf(ctx context.Context, claim *corev1.PersistentVolumeClaim) (v *corev1.PersistentVolume, err error) {
	if claim.Spec.VolumeName != "" {
		if v, err = client.Get[*corev1.PersistentVolume](ctx, r.term.Client, "", claim.Spec.VolumeName); err != nil {
			v = nil
		}
	}
	return v, source(claim, v)
}

// hold has a claim stay until what is to be taken of it is.
func (r *reconciler) hold(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	if slices.Contains(claim.Finalizers, claimFinalizer) {
		return nil
	}
	held := claim.DeepCopy()
	held.Finalizers = append(held.Finalizers, claimFinalizer)
	_, err := client.Update(ctx, r.term.Client, held)
	return err
}

// secrets are what a driver is given for a content; nothing where no Secret is named.
func (r *reconciler) secrets(ctx context.Context, n naming, o *custom.Object, driver string) (map[string]string, error) {
	namespace, name := o.Annotations[n.secretNamespace], o.Annotations[n.secretName]
	if name == "" {
		return nil, nil
	}
	out, err := controllers.SecretFor(ctx, r.term.Client, &corev1.SecretReference{Namespace: namespace, Name: name})
	if err != nil {
		return nil, fmt.Errorf("CSI driver %s: %w", driver, err)
	}
	return out, nil
}

// reaching are the nodes by whose driver what a content stands for is taken, found or deleted.
func (r *reconciler) reaching(o *custom.Object, driver string) ([]string, error) {
	from, err := controllers.ReachedFrom(o)
	if err != nil {
		return nil, err
	}
	v := &corev1.PersistentVolume{Spec: corev1.PersistentVolumeSpec{NodeAffinity: from,
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: driver}}}}
	return controllers.NodesReaching(v, r.csiNodes, r.nodes)
}

// mark notes on a content that a driver is being asked, or takes the note away.
func (r *reconciler) mark(ctx context.Context, n naming, o *custom.Object, on bool) error {
	if metav1.HasAnnotation(o.ObjectMeta, n.beingCreated) == on {
		return nil
	}
	_, err := r.write(ctx, o, func(o *custom.Object) {
		if on {
			metav1.SetMetaDataAnnotation(&o.ObjectMeta, n.beingCreated, "yes")
		} else {
			delete(o.Annotations, n.beingCreated)
		}
	})
	return err
}

// refused tells a content and its owner why it is not taken, and returns that.
func (r *reconciler) refused(ctx context.Context, n naming, o *custom.Object, cause error) error {
	if err := r.says(ctx, o, n.event("CreationFailed"), n.thing+" is not taken: "+cause.Error()); err != nil {
		return err
	}
	return fmt.Errorf("%s %s: %w", o.Kind, o.Name, cause)
}

// removed lets a content go, unless its driver was to delete what it stands for and, as err says, has not.
func (r *reconciler) removed(ctx context.Context, n naming, o *custom.Object, err error) (time.Duration, error) {
	switch {
	case err == nil:
		return 0, r.leave(ctx, n, o)
	case status.Code(err) == codes.Aborted:
		return poll, nil
	}
	r.event(o, corev1.EventTypeWarning, n.event("DeleteError"), n.thing+" is not deleted: "+controllers.Words(err))
	return 0, fmt.Errorf("deleting the %s of %s %s: %w", n.thing, o.Kind, o.Name, err)
}

// leave lets a content go of which the driver has nothing any more, or is to keep it.
func (r *reconciler) leave(ctx context.Context, n naming, o *custom.Object) error {
	_, err := r.write(ctx, o, func(o *custom.Object) {
		delete(o.Annotations, n.beingCreated)
		o.Finalizers = slices.DeleteFunc(o.Finalizers, func(f string) bool { return f == n.finalizer })
	})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// says has an object, and an event of it, say what is in its way. What else its status has stays.
func (r *reconciler) says(ctx context.Context, o *custom.Object, reason, message string) error {
	r.event(o, corev1.EventTypeWarning, reason, message)
	had, _, err := unstructured.NestedMap(o.Content, "status")
	if err != nil {
		return fmt.Errorf("the status of %s %s: %w", o.Kind, controllers.KeyOf(o), err)
	}
	if said, _, _ := unstructured.NestedString(had, "error", "message"); said == message {
		return nil
	}
	if had == nil {
		had = map[string]any{}
	}
	had["error"] = map[string]any{"time": r.term.Now().UTC().Format(time.RFC3339), "message": message}
	had["readyToUse"] = false
	return r.putStatus(ctx, o, had)
}
