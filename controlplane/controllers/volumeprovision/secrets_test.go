package volumeprovision

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// F110: the Secret of a driver call comes from the class, expanded with values of the claim; users
// who write claims do not choose the namespace.
func TestSecretOfAClass(t *testing.T) {
	c := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "data", UID: "u",
		Annotations: map[string]string{"example.com/key": "mine", "example.com/bad": "../x"}}}
	const p = "csi.storage.k8s.io/"
	for name, tc := range map[string]struct {
		parameters map[string]string
		call       string
		want       string // namespace and name, or part of the error
	}{
		"none": {map[string]string{"tier": "fast"}, forProvisioning, ""},
		"as it is": {map[string]string{p + "provisioner-secret-name": "s",
			p + "provisioner-secret-namespace": "n"}, forProvisioning, "n/s"},
		"of another call": {map[string]string{p + "provisioner-secret-name": "s",
			p + "provisioner-secret-namespace": "n"}, forStaging, ""},
		"for any call": {map[string]string{p + "secret-name": "s", p + "secret-namespace": "n"}, forStaging, "n/s"},
		"its own first": {map[string]string{p + "secret-name": "s", p + "secret-namespace": "n",
			p + "node-stage-secret-name": "t", p + "node-stage-secret-namespace": "m"}, forStaging, "m/t"},
		"filled": {map[string]string{p +
			"node-publish-secret-name": "${pvc.name}-${pv.name}-${pvc.namespace}",
			p + "node-publish-secret-namespace": "${pvc.namespace}"}, forPublishing, "team/data-pvc-u-team"},
		"of an annotation": {map[string]string{p + "node-publish-secret-name": "${pvc.annotations['example.com/key']}",
			p + "node-publish-secret-namespace": "n"}, forPublishing, "n/mine"},
		"half": {map[string]string{p + "node-expand-secret-name": "s"}, forNodeGrowing, "is set: set both"},
		"no annotation": {map[string]string{p + "secret-name": "${pvc.annotations['other']}",
			p + "secret-namespace": "n"}, forGrowing, "has the unknown variable ${pvc.annotations['other']}"},
		"a bad name": {map[string]string{p + "secret-name": "${pvc.annotations['example.com/bad']}",
			p + "secret-namespace": "n"}, forGrowing, `has the value "../x", which is not a valid name of a Secret`},
		"a bad namespace": {map[string]string{p + "secret-name": "s", p + "secret-namespace": "a/b"}, forGrowing,
			`has the value "a/b", which is not a valid name of a namespace`},
		"namespace of whoever asks": {map[string]string{p + "secret-name": "s",
			p + "secret-namespace": "${pvc.annotations['example.com/key']}"}, forGrowing,
			"parameter csi.storage.k8s.io/secret-namespace has the unknown variable " +
				"${pvc.annotations['example.com/key']}"},
		"namespace by name": {map[string]string{p + "secret-name": "s", p + "secret-namespace": "${pvc.name}"},
			forGrowing, "has the unknown variable ${pvc.name}"},
	} {
		ref, err := secretFor(tc.call, tc.parameters, c)
		switch {
		case err != nil && (tc.want == "" || !strings.Contains(err.Error(), tc.want)):
			t.Errorf("%s: %v", name, err)
		case err == nil && ref == nil && tc.want != "",
			err == nil && ref != nil && ref.Namespace+"/"+ref.Name != tc.want:
			t.Errorf("%s: %v, not %s", name, ref, tc.want)
		}
	}
}
