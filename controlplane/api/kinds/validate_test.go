package kinds_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

func TestOtherValidation(t *testing.T) {
	kindstest.CheckErrors(t, "key", kindstest.ValidationErrors[*corev1.ConfigMap](t,
		"{metadata: {name: a}, data: {a/b: c}}"), `data[a/b]: Invalid value: "a/b": a valid config key must consist of`)
	big := kindstest.Load[*corev1.ConfigMap](t, "{metadata: {name: a}}")
	big.Data = map[string]string{"a": strings.Repeat("x", 1<<20+1)}
	kindstest.CheckErrors(t, "1 MiB", kinds.All().ByType(big).Validation.Object(big),
		"[]: Too long: may not be more than 1048576")
	kindstest.CheckErrors(t, "tls", kindstest.ValidationErrors[*corev1.Secret](t,
		"{metadata: {name: a}, type: kubernetes.io/tls}"), "data[tls.crt]: Required value",
		"data[tls.key]: Required value")
	kindstest.CheckErrors(t, "rule", kindstest.ValidationErrors[*rbacv1.Role](t,
		"{metadata: {name: 'system:a'}, rules: [{verbs: [get]}]}"),
		"rules[0].apiGroups: Required value", "rules[0].resources: Required value")
	kindstest.CheckErrors(t, "subject", kindstest.ValidationErrors[*rbacv1.ClusterRoleBinding](t,
		"{metadata: {name: a}, roleRef: {kind: Role, name: r}, subjects: [{kind: ServiceAccount, name: s}]}"),
		`roleRef.kind: Unsupported value: "Role": supported values: "ClusterRole"`,
		"subjects[0].namespace: Required value")
	kindstest.CheckErrors(t, "claim", kindstest.ValidationErrors[*corev1.PersistentVolumeClaim](t,
		"{metadata: {name: a}, spec: {}}"),
		"spec.accessModes: Required value", "spec.resources[storage]: Required value")
	kindstest.CheckErrors(t, "mode", kindstest.ValidationErrors[*corev1.PersistentVolumeClaim](t,
		"{metadata: {name: a}, spec: {accessModes: [RWO], resources: {requests: {storage: 1Gi}}}}"),
		`spec.accessModes: Unsupported value: "RWO"`)
	kindstest.CheckErrors(t, "volume", kindstest.ValidationErrors[*corev1.PersistentVolume](t,
		"{metadata: {name: a}, spec: {accessModes: [ReadWriteOnce], capacity: {storage: 1Gi}}}"),
		"spec: Required value: must specify a volume type")
	kindstest.CheckErrors(t, "local", kindstest.ValidationErrors[*corev1.PersistentVolume](t,
		"{metadata: {name: a}, spec: {accessModes: [ReadWriteOnce], capacity: {storage: 1Gi}, local: {path: /a}}}"),
		"spec.nodeAffinity: Required value: Local volume requires node affinity")
	kindstest.CheckErrors(t, "options of NFS",
		kindstest.ValidationErrors[*corev1.PersistentVolume](t,
			"{metadata: {name: a}, spec: {accessModes: [ReadWriteMany], capacity: {storage: 1Gi}, nfs: {server: "+
				"files, path: /a}, mountOptions: [nfsvers=4.1]}}"))
	kindstest.CheckErrors(t, "NFS", kindstest.ValidationErrors[*corev1.PersistentVolume](t,
		"{metadata: {name: a}, spec: {accessModes: [ReadWriteMany], capacity: {storage: 1Gi}, nfs: {path: a}}}"),
		"spec.nfs.server: Required value", `spec.nfs.path: Invalid value: "a": must be an absolute path`)
	kindstest.CheckErrors(t, "NFS without a path",
		kindstest.ValidationErrors[*corev1.Pod](t,
			"{metadata: {name: a}, spec: {containers: [{name: a, image: a}], volumes: [{name: v, nfs: "+
				"{server: files}}]}}"),
		"spec.volumes[0].nfs.path: Required value",
		`spec.volumes[0].nfs.path: Invalid value: "": must be an absolute path`)
	kindstest.CheckErrors(t, "taints", kindstest.ValidationErrors[*corev1.Node](t,
		"{metadata: {name: a}, spec: {taints: [{key: a, effect: NoRun}, {key: b, effect: NoExecute}, {key: b, "+
			"effect: NoExecute}]}}"),
		`metadata.taints[0].effect: Unsupported value: "NoRun"`, "metadata.taints[2]: Duplicate value")
	kindstest.CheckErrors(t, "class", kindstest.ValidationErrors[*storagev1.StorageClass](t, "{metadata: {name: a}}"),
		"provisioner: Required value")
	kindstest.CheckErrors(t, "namespace name",
		kindstest.ValidationErrors[*corev1.Namespace](t, "{metadata: {name: a.b}}"),
		`metadata.name: Invalid value: "a.b"`)
	kindstest.CheckErrors(t, "event", kindstest.ValidationErrors[*corev1.Event](t,
		"{metadata: {name: a}, involvedObject: {namespace: other}}"), "involvedObject.namespace: Invalid value")
}
