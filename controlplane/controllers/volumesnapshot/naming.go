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
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/controllers"
)

// naming is what snapshots and groups of them call the same things.
type naming struct {
	class, classes, field string // the kind of classes, more than one of them, the field that names one
	of                    string // whose driver is meant
	owner, content        string // variables in the names of Secrets

	// Annotations of classes and contents, the finalizer of contents, parameters of classes.
	defaultClass, secretName, secretNamespace, beingCreated, finalizer, nameParam, namespaceParam string
}

var (
	ofSnapshots = naming{class: "VolumeSnapshotClass", classes: "VolumeSnapshotClasses", field: "spec.volumeSnapshotClassName", of: "the volume of the claim is",
		owner: "volumesnapshot", content: "volumesnapshotcontent", defaultClass: defaultClass, secretName: secretName, secretNamespace: secretNamespace,
		beingCreated: beingCreated, finalizer: contentFinalizer, nameParam: secretNameParam, namespaceParam: secretNamespaceParam}
	ofGroups = naming{class: "VolumeGroupSnapshotClass", classes: "VolumeGroupSnapshotClasses", field: "spec.volumeGroupSnapshotClassName", of: "the volumes of the claims are",
		owner: "volumegroupsnapshot", content: "volumegroupsnapshotcontent", defaultClass: groupDefaultClass, secretName: groupSecretName, secretNamespace: groupSecretNamespace,
		beingCreated: groupBeingCreated, finalizer: groupContentFinalizer, nameParam: groupSecretNameParam, namespaceParam: groupSecretNamespaceParam}
)

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
			return class{}, fmt.Errorf("%s %q does not exist", n.class, *named)
		case all[i].driver != driver:
			return class{}, fmt.Errorf("%s %q is of CSI driver %s, and %s of %s: name a class of that driver", n.class, *named, all[i].driver, n.of, driver)
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
		return class{}, fmt.Errorf("no %s is the default of CSI driver %s: name one in %s, or annotate one with %s=true", n.class, driver, n.field, n.defaultClass)
	case 1:
		return defaults[0], nil
	}
	slices.Sort(names)
	return class{}, fmt.Errorf("%s %s are all the default of CSI driver %s: name one in %s, or leave the annotation to one", n.classes, strings.Join(names, ", "), driver, n.field)
}

// told are the parameters that the driver is told of. What begins with csi.storage.k8s.io/ is for who calls it.
func (n naming) told(c class) (map[string]string, error) {
	out := map[string]string{}
	for _, k := range slices.Sorted(maps.Keys(c.parameters)) {
		switch {
		case !strings.HasPrefix(k, reserved):
			out[k] = c.parameters[k]
		case k != n.nameParam && k != n.namespaceParam:
			return nil, fmt.Errorf("parameter %s of %s %s is not served for drivers that the agents serve: leave it out", k, n.class, c.name)
		}
	}
	return out, nil
}

// note puts on a content that is made for an owner which Secret its driver is given, and from which nodes it is reached.
func (n naming) note(content *metav1.ObjectMeta, c class, owner metav1.Object, from *corev1.VolumeNodeAffinity) error {
	name, namespace := c.parameters[n.nameParam], c.parameters[n.namespaceParam]
	if (name == "") != (namespace == "") {
		return fmt.Errorf("%s %s has one of the parameters %s and %s: both belong together", n.class, c.name, n.nameParam, n.namespaceParam)
	}
	fill := strings.NewReplacer("${"+n.owner+".name}", owner.GetName(), "${"+n.owner+".namespace}", owner.GetNamespace(), "${"+n.content+".name}", content.Name)
	name, namespace = fill.Replace(name), fill.Replace(namespace)
	if strings.Contains(name+namespace, "${") {
		return fmt.Errorf("%s %s: its Secret %s/%s has a variable that there is not", n.class, c.name, namespace, name)
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
	status, _, err := unstructured.NestedMap(o.Content, "status")
	if err != nil {
		return fmt.Errorf("the status of %s %s: %w", o.Kind, controllers.KeyOf(o), err)
	}
	if said, _, _ := unstructured.NestedString(status, "error", "message"); said == message {
		return nil
	}
	if status == nil {
		status = map[string]any{}
	}
	status["error"] = map[string]any{"time": r.term.Now().UTC().Format(time.RFC3339), "message": message}
	status["readyToUse"] = false
	return r.putStatus(ctx, o, status)
}
