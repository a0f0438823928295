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

// naming holds the names that differ between snapshots and group snapshots.
type naming struct {
	kind           string // prefix of the names of the class and content kinds
	thing          string // noun in messages
	field, ref     string // fields of spec: the class of a snapshot, and the snapshot of a content
	handle         string // field of a content's spec: the handle of a pre-provisioned snapshot
	claims, of     string // parts of messages: the source of a content, and the volumes of the driver
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

// eventReason returns the reason of an event: "Snapshot" or "GroupSnapshot" followed by what.
func (n naming) eventReason(what string) string { return strings.TrimPrefix(n.kind, "Volume") + what }

// class is a VolumeSnapshotClass or a VolumeGroupSnapshotClass.
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

// classFor returns the named class or, if named is empty, the driver's default class.
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
		return class{}, fmt.Errorf("no %sClass is the default of CSI driver %s: name a class in spec.%s, or annotate a class with %s=true", n.kind, driver, n.field, n.defaultClass)
	case 1:
		return defaults[0], nil
	}
	slices.Sort(names)
	return class{}, fmt.Errorf("%sClasses %s are all the default of CSI driver %s: name one in spec.%s, or leave the annotation to one", n.kind, strings.Join(names, ", "), driver, n.field)
}

// chooseClass returns the class of a snapshot: the named class, or the default class of the driver.
func chooseClass[T any](ctx context.Context, r *reconciler, n naming, named *string, driver string, of func(*T) class) (class, error) {
	list, err := controllers.ListTyped[T](ctx, r.term.Client, r.snapshotKind(n.kind+"Class"), "")
	if err != nil {
		return class{}, err
	}
	var all []class
	for _, one := range list {
		all = append(all, of(one.Typed))
	}
	return n.classFor(named, driver, all)
}

// withClass writes the name of the chosen class to a snapshot that names no class.
func withClass[T any](ctx context.Context, r *reconciler, n naming, s controllers.TypedObject[T], named *string, c class) (controllers.TypedObject[T], error) {
	if named != nil {
		return s, nil
	}
	return writeChange(ctx, r, s, func(o *custom.Object) { o.Content["spec"].(map[string]any)[n.field] = c.name })
}

// classParameters returns the parameters of a content's class that are passed to the driver.
func classParameters[T any](ctx context.Context, r *reconciler, n naming, name *string, of func(*T) class) (map[string]string, error) {
	if name == nil {
		return nil, nil
	}
	c, err := controllers.GetTyped[T](ctx, r.term.Client, r.snapshotKind(n.kind+"Class"), "", *name)
	if err != nil {
		return nil, fmt.Errorf("%sClass %s: %w", n.kind, *name, err)
	}
	return n.driverParameters(of(c.Typed))
}

// driverParameters returns the parameters of a class that are passed to the driver. Parameters with
// the prefix csi.storage.k8s.io/ are for the caller.
func (n naming) driverParameters(c class) (map[string]string, error) {
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

// annotateContent sets the annotations of a new content: the Secret for its driver, and the nodes
// that can reach the snapshot.
func (n naming) annotateContent(content *metav1.ObjectMeta, c class, owner metav1.Object, from *corev1.VolumeNodeAffinity) error {
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

// checkOwnership returns an error if a content that a snapshot names does not belong to it. made
// means that the content was created dynamically, and not for the snapshot that names it.
func (n naming) checkOwnership(owner, content metav1.Object, ref corev1.ObjectReference, made bool) error {
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

// contentNamed reads a content. It returns nil if the content does not exist.
func contentNamed[T any](ctx context.Context, r *reconciler, n naming, name string) (*controllers.TypedObject[T], error) {
	c, err := controllers.GetTyped[T](ctx, r.term.Client, r.snapshotKind(n.kind+"Content"), "", name)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return &c, err
}

// bindContent binds a content to its owner and adds the finalizer that protects its data.
func bindContent[T any](ctx context.Context, r *reconciler, n naming, c controllers.TypedObject[T], ref corev1.ObjectReference, owner types.UID) (controllers.TypedObject[T], error) {
	if ref.UID != "" && slices.Contains(c.Object.Finalizers, n.finalizer) {
		return c, nil
	}
	return writeChange(ctx, r, c, func(o *custom.Object) {
		o.Content["spec"].(map[string]any)[n.ref].(map[string]any)["uid"] = string(owner)
		if !slices.Contains(o.Finalizers, n.finalizer) {
			o.Finalizers = append(o.Finalizers, n.finalizer)
		}
	})
}

// volumeOf returns the volume of a claim, or an error if the claim cannot be the source of a
// snapshot.
func (r *reconciler) volumeOf(ctx context.Context, claim *corev1.PersistentVolumeClaim) (v *corev1.PersistentVolume, err error) {
	if claim.Spec.VolumeName != "" {
		if v, err = client.Get[*corev1.PersistentVolume](ctx, r.term.Client, "", claim.Spec.VolumeName); err != nil {
			v = nil
		}
	}
	return v, checkSource(claim, v)
}

// protectClaim adds the finalizer that keeps a claim until its snapshot is taken.
func (r *reconciler) protectClaim(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	if slices.Contains(claim.Finalizers, claimFinalizer) {
		return nil
	}
	held := claim.DeepCopy()
	held.Finalizers = append(held.Finalizers, claimFinalizer)
	_, err := client.Update(ctx, r.term.Client, held)
	return err
}

// contentSecrets returns the data of the Secret for the driver of a content, or nil if the content
// names no Secret.
func (r *reconciler) contentSecrets(ctx context.Context, n naming, o *custom.Object, driver string) (map[string]string, error) {
	namespace, name := o.Annotations[n.secretNamespace], o.Annotations[n.secretName]
	if name == "" {
		return nil, nil
	}
	out, err := controllers.ReadDriverSecret(ctx, r.term.Client, &corev1.SecretReference{Namespace: namespace, Name: name})
	if err != nil {
		return nil, fmt.Errorf("CSI driver %s: %w", driver, err)
	}
	return out, nil
}

// contentNodes returns the nodes with the driver that takes, finds or deletes the snapshot of a
// content.
func (r *reconciler) contentNodes(o *custom.Object, driver string) ([]string, error) {
	from, err := controllers.ReachableNodeAffinity(o)
	if err != nil {
		return nil, err
	}
	v := &corev1.PersistentVolume{Spec: corev1.PersistentVolumeSpec{NodeAffinity: from,
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: driver}}}}
	return controllers.ListReachingNodes(v, r.csiNodes, r.nodes)
}

// markInProgress sets or removes the annotation that a driver is creating the snapshot of a
// content.
func (r *reconciler) markInProgress(ctx context.Context, n naming, o *custom.Object, on bool) error {
	if metav1.HasAnnotation(o.ObjectMeta, n.beingCreated) == on {
		return nil
	}
	_, err := r.writeObject(ctx, o, func(o *custom.Object) {
		if on {
			metav1.SetMetaDataAnnotation(&o.ObjectMeta, n.beingCreated, "yes")
		} else {
			delete(o.Annotations, n.beingCreated)
		}
	})
	return err
}

// recordRefusal writes the reason why a snapshot was not taken to the content's status and an
// event. It returns the reason as an error.
func (r *reconciler) recordRefusal(ctx context.Context, n naming, o *custom.Object, cause error) error {
	if err := r.recordError(ctx, o, n.eventReason("CreationFailed"), n.thing+" is not taken: "+cause.Error()); err != nil {
		return err
	}
	return fmt.Errorf("%s %s: %w", o.Kind, o.Name, cause)
}

// finishRemoval removes the content's finalizer if err is nil. Otherwise it reports the failed
// deletion.
func (r *reconciler) finishRemoval(ctx context.Context, n naming, o *custom.Object, err error) (time.Duration, error) {
	switch {
	case err == nil:
		return 0, r.releaseContent(ctx, n, o)
	case status.Code(err) == codes.Aborted:
		return poll, nil
	}
	r.recordEvent(o, corev1.EventTypeWarning, n.eventReason("DeleteError"), n.thing+" is not deleted: "+controllers.DriverErrorText(err))
	return 0, fmt.Errorf("deleting the %s of %s %s: %w", n.thing, o.Kind, o.Name, err)
}

// releaseContent removes the finalizer of a content after its data were deleted or if they are
// retained.
func (r *reconciler) releaseContent(ctx context.Context, n naming, o *custom.Object) error {
	_, err := r.writeObject(ctx, o, func(o *custom.Object) {
		delete(o.Annotations, n.beingCreated)
		o.Finalizers = slices.DeleteFunc(o.Finalizers, func(f string) bool { return f == n.finalizer })
	})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// recordError writes an error to an object's status and records it as an event. Other fields of the
// status are not changed.
func (r *reconciler) recordError(ctx context.Context, o *custom.Object, reason, message string) error {
	r.recordEvent(o, corev1.EventTypeWarning, reason, message)
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
