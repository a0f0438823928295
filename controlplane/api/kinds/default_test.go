package kinds_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

func TestOtherDefaults(t *testing.T) {
	kindstest.CheckDefaults[*corev1.Secret](t, "{metadata: {name: a}, data: {a: YQ==}, stringData: {b: b}}",
		"{type: Opaque, data: {a: YQ==, b: Yg==}}")
	kindstest.CheckDefaults[*storagev1.StorageClass](t, "{metadata: {name: a}, provisioner: p}",
		"{provisioner: p, reclaimPolicy: Delete, volumeBindingMode: Immediate}")
	kindstest.CheckDefaults[*storagev1.CSIDriver](t, "{metadata: {name: a}, spec: {}}",
		`{spec: {attachRequired: true, podInfoOnMount: false,
 storageCapacity: false, requiresRepublish: false, seLinuxMount: false, fsGroupPolicy: ReadWriteOnceWithFSType, volumeLifecycleModes: [Persistent]}}`)
	kindstest.CheckDefaults[*rbacv1.RoleBinding](t,
		"{metadata: {name: a}, roleRef: {kind: Role, name: r}, subjects: [{kind: User, name: u}, {kind: "+
			"ServiceAccount, name: s}]}",
		`{roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: r},
 subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: u}, {kind: ServiceAccount, name: s}]}`)
	if ns := kindstest.Load[*corev1.Namespace](t, "{metadata: {name: a}}"); ns.Labels["kubernetes.io/metadata.name"] !=
		"a" || ns.Status.Phase != "Active" {
		t.Errorf("namespace %+v", ns)
	}
}
