package volumeprovision

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"keelson.dev/keelson/controlplane/controllers/engine"
)

// Kinds of driver calls for which a StorageClass may name a Secret, by two parameters:
// csi.storage.k8s.io/<kind>secret-name and csi.storage.k8s.io/<kind>secret-namespace. The Secret of
// forAny is used for all kinds of calls for which the class names no Secret.
const (
	forAny          = ""
	forProvisioning = "provisioner-"
	forAttaching    = "controller-publish-"
	forStaging      = "node-stage-"
	forPublishing   = "node-publish-"
	forGrowing      = "controller-expand-"
	forNodeGrowing  = "node-expand-"
	forModifying    = "controller-modify-"
)

var secretCalls = []string{forAny, forProvisioning, forAttaching, forStaging, forPublishing, forGrowing,
	forNodeGrowing, forModifying}

// Annotations of a PersistentVolume that name the Secret for the DeleteVolume call.
const (
	deletionSecretName      = "volume.kubernetes.io/provisioner-deletion-secret-name"
	deletionSecretNamespace = "volume.kubernetes.io/provisioner-deletion-secret-namespace"
)

func secretParams(call string) (name, namespace string) {
	return reserved + call + "secret-name", reserved + call + "secret-namespace"
}

// namesSecret reports whether a StorageClass parameter is the name or the namespace of a Secret.
func namesSecret(parameter string) bool {
	return slices.ContainsFunc(secretCalls, func(call string) bool {
		name, namespace := secretParams(call)
		return parameter == name || parameter == namespace
	})
}

// secretFor returns the Secret for one kind of driver call, such as forStaging, from the parameters
// of a StorageClass. Variables in the parameters are replaced with values of claim c. secretFor
// returns nil if the class names no Secret.
func secretFor(call string, parameters map[string]string, c *corev1.PersistentVolumeClaim) (
	*corev1.SecretReference, error,
) {
	nameParam, namespaceParam := secretParams(call)
	name, namespace := parameters[nameParam], parameters[namespaceParam]
	switch {
	case name == "" && namespace == "" && call != forAny:
		return secretFor(forAny, parameters, c)
	case name == "" && namespace == "":
		return nil, nil
	case name == "" || namespace == "":
		return nil, fmt.Errorf("only one of the parameters %s and %s is set: set both", nameParam, namespaceParam)
	}
	// Users who write claims choose their names and annotations. They must not choose the namespace
	// in which a Secret is read.
	known := map[string]string{"pv.name": volumeName(c), "pvc.namespace": c.Namespace}
	namespace, err := expandVariables(namespaceParam, namespace, known)
	if err != nil {
		return nil, err
	}
	if len(validation.IsDNS1123Label(namespace)) > 0 {
		return nil, fmt.Errorf("parameter %s has the value %q, which is not a valid name of a namespace",
			namespaceParam, namespace)
	}
	known["pvc.name"] = c.Name
	for k, v := range c.Annotations {
		known["pvc.annotations['"+k+"']"] = v
	}
	if name, err = expandVariables(nameParam, name, known); err != nil {
		return nil, err
	}
	if len(validation.IsDNS1123Subdomain(name)) > 0 {
		return nil, fmt.Errorf("parameter %s has the value %.253q, which is not a valid name of a Secret",
			nameParam, name)
	}
	return &corev1.SecretReference{Namespace: namespace, Name: name}, nil
}

// expandVariables returns text with each ${variable} replaced by its value in known. It returns an
// error if a variable is not in known. parameter is the name of the parameter in the error.
func expandVariables(parameter, text string, known map[string]string) (string, error) {
	var missing []string
	out := os.Expand(text, func(k string) string {
		v, ok := known[k]
		if !ok {
			missing = append(missing, "${"+k+"}")
		}
		return v
	})
	if len(missing) > 0 {
		return "",
			fmt.Errorf("parameter %s has the unknown variable %s: known variables are ${pv.name} and "+
				"${pvc.namespace}, "+
				"and in names also ${pvc.name} and ${pvc.annotations['KEY']} if the claim has that annotation",
				parameter,
				strings.Join(missing, ", "))
	}
	return out, nil
}

// secrets maps a kind of driver call to the Secret for these calls.
type secrets map[string]*corev1.SecretReference

func secretsOf(parameters map[string]string, c *corev1.PersistentVolumeClaim) (secrets, error) {
	out := secrets{}
	for _, call := range secretCalls {
		ref, err := secretFor(call, parameters, c)
		if err != nil {
			return nil, err
		}
		if ref != nil {
			out[call] = ref
		}
	}
	return out, nil
}

// annotateVolume writes the Secrets for later calls of the driver to the spec and the annotations
// of PersistentVolume v.
func (s secrets) annotateVolume(v *corev1.PersistentVolume) {
	csi := v.Spec.CSI
	csi.ControllerPublishSecretRef, csi.NodeStageSecretRef, csi.NodePublishSecretRef = s[forAttaching], s[forStaging],
		s[forPublishing]
	csi.ControllerExpandSecretRef, csi.NodeExpandSecretRef = s[forGrowing], s[forNodeGrowing]
	if ref := s[forProvisioning]; ref != nil {
		metav1.SetMetaDataAnnotation(&v.ObjectMeta, deletionSecretName, ref.Name)
		metav1.SetMetaDataAnnotation(&v.ObjectMeta, deletionSecretNamespace, ref.Namespace)
	}
	if ref := s[forModifying]; ref != nil {
		metav1.SetMetaDataAnnotation(&v.ObjectMeta, engine.ModifySecretName, ref.Name)
		metav1.SetMetaDataAnnotation(&v.ObjectMeta, engine.ModifySecretNamespace, ref.Namespace)
	}
}

// readSecret returns the data of a Secret for the CreateVolume call. It returns nil if ref is nil.
func (p *provisioner) readSecret(ctx context.Context, ref *corev1.SecretReference) (map[string]string, error) {
	out, err := engine.ReadDriverSecret(ctx, p.term.Client, ref)
	if err != nil {
		// drop the type of the error: the caller would treat NotFound as a conflict of the claim
		return nil, errors.New(err.Error())
	}
	return out, nil
}

// readDeletionSecret returns the data of the Secret for the deletion of a volume. It returns nil
// without an error if the Secret no longer exists; the driver then decides whether it needs the
// Secret.
func (p *provisioner) readDeletionSecret(ctx context.Context, ref *corev1.SecretReference) (map[string]string, error) {
	out, err := engine.ReadDriverSecret(ctx, p.term.Client, ref)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return out, err
}

// deletionSecret returns the Secret that PersistentVolume v names for its deletion, or nil.
func deletionSecret(v *corev1.PersistentVolume) *corev1.SecretReference {
	name, namespace := v.Annotations[deletionSecretName], v.Annotations[deletionSecretNamespace]
	if name == "" || namespace == "" {
		return nil
	}
	return &corev1.SecretReference{Namespace: namespace, Name: name}
}
