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
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// naming holds the names of kinds, fields and annotations that differ between snapshots and group
// snapshots, so that both share one implementation.
type naming struct {
	kind       string // VolumeSnapshot or VolumeGroupSnapshot; suffix Class or Content gives the related kinds
	thing      string // noun for a snapshot in error messages and events
	field, ref string // names of spec fields: the class in a snapshot, and the reference to the snapshot in a content
	handle     string // name of the spec field of a content with the handle of a pre-provisioned snapshot
	claims, of string // phrases about the claims of a snapshot, and about their volumes, for messages

	defaultClass            string // annotation that marks the default class of a driver
	beingCreated, finalizer string // annotation during the creation of a content's snapshot, and finalizer
	secret                  secretNaming
}

// secretNaming holds the names with which a class names a Secret for its driver, and with which a
// content stores the name of that Secret.
type secretNaming struct {
	nameParam, namespaceParam           string // parameters of a class that name the Secret
	ownerVariable, contentVariable      string // names of the variables in the values of these parameters
	nameAnnotation, namespaceAnnotation string // annotations of a content that name the Secret
}

var (
	ofSnapshots = naming{
		kind: "VolumeSnapshot", thing: "snapshot", field: "volumeSnapshotClassName", ref: "volumeSnapshotRef",
		handle: "source.snapshotHandle", claims: "a claim", of: "the volume of the claim is",
		defaultClass: defaultClass, beingCreated: beingCreated, finalizer: contentFinalizer,
		secret: secretNaming{
			nameParam: secretNameParam, namespaceParam: secretNamespaceParam,
			ownerVariable: "volumesnapshot", contentVariable: "volumesnapshotcontent",
			nameAnnotation: secretName, namespaceAnnotation: secretNamespace,
		},
	}
	ofGroups = naming{
		kind: "VolumeGroupSnapshot", thing: "group of snapshots", field: "volumeGroupSnapshotClassName",
		ref:    "volumeGroupSnapshotRef",
		handle: "source.groupSnapshotHandles", claims: "claims", of: "the volumes of the claims are",
		defaultClass: groupDefaultClass, beingCreated: groupBeingCreated, finalizer: groupContentFinalizer,
		secret: secretNaming{
			nameParam: groupSecretNameParam, namespaceParam: groupSecretNamespaceParam,
			ownerVariable: "volumegroupsnapshot", contentVariable: "volumegroupsnapshotcontent",
			nameAnnotation: groupSecretName, namespaceAnnotation: groupSecretNamespace,
		},
	}
)

// eventReason returns the reason of an event: "Snapshot" or "GroupSnapshot", followed by suffix.
func (n naming) eventReason(suffix string) string {
	return strings.TrimPrefix(n.kind, "Volume") + suffix
}

// class has the fields that a VolumeSnapshotClass and a VolumeGroupSnapshotClass have in common.
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

// classFor returns the class called className from the given classes. If className is nil or empty,
// it returns the default class of the driver.
func (n naming) classFor(className *string, driver string, classes []class) (class, error) {
	if className != nil && *className != "" {
		i := slices.IndexFunc(classes, func(c class) bool { return c.name == *className })
		switch {
		case i < 0:
			return class{}, fmt.Errorf("%sClass %q does not exist", n.kind, *className)
		case classes[i].driver != driver:
			return class{},
				fmt.Errorf("%sClass %q belongs to CSI driver %s, and %s of %s: choose a class of that driver", n.kind,
					*className, classes[i].driver, n.of, driver)
		}
		return classes[i], nil
	}
	var defaults []class
	var names []string
	for _, c := range classes {
		if c.driver == driver && c.annotations[n.defaultClass] == "true" {
			defaults, names = append(defaults, c), append(names, c.name)
		}
	}
	switch len(defaults) {
	case 0:
		return class{},
			fmt.Errorf("no %sClass is the default of CSI driver %s: set spec.%s, or annotate a class with %s=true",
				n.kind, driver, n.field, n.defaultClass)
	case 1:
		return defaults[0], nil
	}
	slices.Sort(names)
	return class{},
		fmt.Errorf("%sClasses %s are all the default of CSI driver %s: choose one in spec.%s, or keep the annotation "+
			"on only one of them", n.kind, strings.Join(names, ", "), driver, n.field)
}

// chooseClass lists the classes and returns the class called className. If className is nil or
// empty, it returns the default class of the driver. toClass converts an object of kind T to a
// class.
func chooseClass[T any](
	ctx context.Context, r *reconciler, n naming, className *string, driver string, toClass func(*T) class,
) (class, error) {
	list, err := engine.ListTyped[T](ctx, r.term.Client, r.snapshotKind(n.kind+"Class"), "")
	if err != nil {
		return class{}, err
	}
	var all []class
	for _, one := range list {
		all = append(all, toClass(one.Typed))
	}
	return n.classFor(className, driver, all)
}

// withClass writes the name of class c to the spec of snapshot s if className, the class in that
// spec, is nil. It returns s as stored.
func withClass[T any](
	ctx context.Context, r *reconciler, n naming, s engine.TypedObject[T], className *string, c class,
) (engine.TypedObject[T], error) {
	if className != nil {
		return s, nil
	}
	return writeChange(ctx, r, s, func(o *custom.Object) { o.Content["spec"].(map[string]any)[n.field] = c.name })
}

// classParameters returns the parameters for the driver of the class with this name. It returns nil
// if name is nil. toClass converts an object of kind T to a class.
func classParameters[T any](ctx context.Context, r *reconciler, n naming, name *string, toClass func(*T) class) (
	map[string]string, error,
) {
	if name == nil {
		return nil, nil
	}
	c, err := engine.GetTyped[T](ctx, r.term.Client, r.snapshotKind(n.kind+"Class"), "", *name)
	if err != nil {
		return nil, fmt.Errorf("%sClass %s: %w", n.kind, *name, err)
	}
	return n.driverParameters(toClass(c.Typed))
}

// driverParameters returns the parameters of class c that are passed to the driver. Parameters with
// prefix csi.storage.k8s.io/ are evaluated here and are not passed on.
func (n naming) driverParameters(c class) (map[string]string, error) {
	out := map[string]string{}
	for _, k := range slices.Sorted(maps.Keys(c.parameters)) {
		switch {
		case !strings.HasPrefix(k, reserved):
			out[k] = c.parameters[k]
		case k != n.secret.nameParam && k != n.secret.namespaceParam:
			return nil,
				fmt.Errorf("parameter %s of %sClass %s is not served for drivers that the agents serve: leave it out",
					k, n.kind, c.name)
		}
	}
	return out, nil
}

// annotateContent sets the annotations of a new snapshot content. They name the Secret for calls to
// its driver, which class c specifies, and the nodes that can reach the snapshot, which affinity
// selects. If affinity is nil, every node can reach it. owner is the snapshot.
func (n naming) annotateContent(
	content *metav1.ObjectMeta, c class, owner metav1.Object, affinity *corev1.VolumeNodeAffinity,
) error {
	name, namespace := c.parameters[n.secret.nameParam], c.parameters[n.secret.namespaceParam]
	if (name == "") != (namespace == "") {
		return fmt.Errorf("%sClass %s has only one of the parameters %s and %s: set both", n.kind, c.name,
			n.secret.nameParam, n.secret.namespaceParam)
	}
	fill := strings.NewReplacer("${"+n.secret.ownerVariable+".name}", owner.GetName(),
		"${"+n.secret.ownerVariable+".namespace}", owner.GetNamespace(),
		"${"+n.secret.contentVariable+".name}", content.Name)
	name, namespace = fill.Replace(name), fill.Replace(namespace)
	if strings.Contains(name+namespace, "${") {
		return fmt.Errorf("%sClass %s: the name of its Secret %s/%s contains an unknown variable", n.kind, c.name,
			namespace, name)
	}
	if name != "" {
		metav1.SetMetaDataAnnotation(content, n.secret.nameAnnotation, name)
		metav1.SetMetaDataAnnotation(content, n.secret.namespaceAnnotation, namespace)
	}
	if affinity == nil {
		return nil
	}
	text, err := json.Marshal(affinity)
	if err != nil {
		return err
	}
	metav1.SetMetaDataAnnotation(content, engine.ReachedFromAnnotation, string(text))
	return nil
}

// checkOwnership returns an error if the content that snapshot owner names does not belong to
// owner. ref is the content's reference to its snapshot. made reports that the content was created
// dynamically although owner names it as pre-provisioned.
func (n naming) checkOwnership(owner, content metav1.Object, ref corev1.ObjectReference, made bool) error {
	c := n.kind + "Content " + content.GetName()
	switch {
	case ref.Namespace != owner.GetNamespace() || ref.Name != owner.GetName():
		return fmt.Errorf("%s is for %s %s/%s", c, n.kind, ref.Namespace, ref.Name)
	case ref.UID != "" && ref.UID != owner.GetUID():
		return fmt.Errorf("%s belongs to an earlier %s of this name", c, n.kind)
	case made:
		return fmt.Errorf("%s was created for %s, and has no %s", c, n.claims, n.handle)
	case content.GetDeletionTimestamp() != nil:
		return fmt.Errorf("%s is being deleted", c)
	}
	return nil
}

// findContent reads the snapshot content of this name from the API. It returns nil if it does not
// exist.
func findContent[T any](ctx context.Context, r *reconciler, n naming, name string) (*engine.TypedObject[T], error) {
	c, err := engine.GetTyped[T](ctx, r.term.Client, r.snapshotKind(n.kind+"Content"), "", name)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return &c, err
}

// bindContent binds snapshot content c to the snapshot with UID owner. ref is the current reference
// of c to the snapshot. bindContent also adds the finalizer that keeps c until its data are
// deleted. It returns c as stored.
func bindContent[T any](
	ctx context.Context, r *reconciler, n naming, c engine.TypedObject[T], ref corev1.ObjectReference, owner types.UID,
) (engine.TypedObject[T], error) {
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

// volumeOf returns the PersistentVolume of a claim. It returns an error if no snapshot can be taken
// of the claim.
func (r *reconciler) volumeOf(ctx context.Context, claim *corev1.PersistentVolumeClaim) (
	v *corev1.PersistentVolume, err error,
) {
	if claim.Spec.VolumeName != "" {
		if v, err = client.Get[*corev1.PersistentVolume](ctx, r.term.Client, "", claim.Spec.VolumeName); err != nil {
			v = nil
		}
	}
	return v, checkSource(claim, v)
}

// protectClaim adds claimFinalizer to a claim, which keeps the claim until its snapshot is taken.
func (r *reconciler) protectClaim(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	if slices.Contains(claim.Finalizers, claimFinalizer) {
		return nil
	}
	held := claim.DeepCopy()
	held.Finalizers = append(held.Finalizers, claimFinalizer)
	_, err := client.Update(ctx, r.term.Client, held)
	return err
}

// contentSecrets returns the data of the Secret that snapshot content o names for calls of its
// driver. It returns nil if o names no Secret.
func (r *reconciler) contentSecrets(ctx context.Context, n naming, o *custom.Object, driver string) (
	map[string]string, error,
) {
	namespace, name := o.Annotations[n.secret.namespaceAnnotation], o.Annotations[n.secret.nameAnnotation]
	if name == "" {
		return nil, nil
	}
	out, err := engine.ReadDriverSecret(ctx, r.term.Client, &corev1.SecretReference{Namespace: namespace, Name: name})
	if err != nil {
		return nil, fmt.Errorf("CSI driver %s: %w", driver, err)
	}
	return out, nil
}

// contentNodes returns the nodes that have the driver and reach the snapshot of snapshot content o.
// The driver is called through these nodes. It returns an error if none exist.
func (r *reconciler) contentNodes(o *custom.Object, driver string) ([]string, error) {
	from, err := engine.ReachableNodeAffinity(o)
	if err != nil {
		return nil, err
	}
	v := &corev1.PersistentVolume{Spec: corev1.PersistentVolumeSpec{NodeAffinity: from,
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: driver}}}}
	return engine.ListReachingNodes(v, r.csiNodes, r.nodes)
}

// markInProgress sets the annotation n.beingCreated of snapshot content o if inProgress is true,
// and removes it otherwise. The annotation means that the driver may have been called to create the
// snapshot.
func (r *reconciler) markInProgress(ctx context.Context, n naming, o *custom.Object, inProgress bool) error {
	if metav1.HasAnnotation(o.ObjectMeta, n.beingCreated) == inProgress {
		return nil
	}
	_, err := r.writeObject(ctx, o, func(o *custom.Object) {
		if inProgress {
			metav1.SetMetaDataAnnotation(&o.ObjectMeta, n.beingCreated, "yes")
		} else {
			delete(o.Annotations, n.beingCreated)
		}
	})
	return err
}

// recordRefusal writes cause, the reason why a snapshot was not taken or found, to the status of
// snapshot content o and to an event. It returns cause.
func (r *reconciler) recordRefusal(ctx context.Context, n naming, o *custom.Object, cause error) error {
	if err := r.recordError(ctx, o, n.eventReason("CreationFailed"), n.thing+" is not taken: "+cause.Error()); err !=
		nil {
		return err
	}
	return fmt.Errorf("%s %s: %w", o.Kind, o.Name, cause)
}

// finishRemoval removes the finalizer of snapshot content o if err, the result of the deletion of
// its data, is nil. If the driver is still busy, it returns the delay until the next attempt. Any
// other error is recorded as an event and returned.
func (r *reconciler) finishRemoval(ctx context.Context, n naming, o *custom.Object, err error) (time.Duration, error) {
	switch {
	case err == nil:
		return 0, r.releaseContent(ctx, n, o)
	case status.Code(err) == codes.Aborted:
		return pollInterval, nil
	}
	r.recordEvent(o, corev1.EventTypeWarning, n.eventReason("DeleteError"),
		n.thing+" is not deleted: "+engine.DriverErrorText(err))
	return 0, fmt.Errorf("deleting the %s of %s %s: %w", n.thing, o.Kind, o.Name, err)
}

// releaseContent removes the finalizer of snapshot content o after its data were deleted or if they
// are retained.
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

// recordError writes an error to the status of object o and records it as an event. The other
// fields of the status are not changed.
func (r *reconciler) recordError(ctx context.Context, o *custom.Object, reason, message string) error {
	r.recordEvent(o, corev1.EventTypeWarning, reason, message)
	had, _, err := unstructured.NestedMap(o.Content, "status")
	if err != nil {
		return fmt.Errorf("the status of %s %s: %w", o.Kind, engine.KeyOf(o), err)
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
