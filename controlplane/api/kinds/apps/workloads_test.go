package apps_test

import (
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// lastingWrongs are wrong in every kind that keeps pods running.
func lastingWrongs(kind string) []kindstest.InvalidPatch {
	return []kindstest.InvalidPatch{
		{"metadata: {name: A_b}", `metadata.name: Invalid value: "A_b"`},
		{"metadata: {labels: {a b: c}}", `metadata.labels: Invalid value: "a b"`},
		{"spec: {selector: null}", map[string]string{"statefulset": "spec.selector: Required value; "}[kind] +
			"spec.template.metadata.labels: Invalid value: {\"a\":\"b\"}: `selector` does not match template `labels`"},
		{"spec: {selector: {matchLabels: null}}", "spec.selector: Invalid value: {}: empty selector is invalid for " + kind},
		{"spec: {selector: {matchLabels: {a: c}}}", "spec.template.metadata.labels: Invalid value: {\"a\":\"b\"}: `selector` does not match template `labels`"},
		{"spec: {selector: {matchExpressions: [{key: a, operator: Near}]}}", "spec.selector.matchExpressions[0].operator: Invalid value: \"Near\": not a valid selector operator"},
		{"spec: {selector: {matchExpressions: [{key: a, operator: In}]}}", "spec.selector.matchExpressions[0].values: Required value: must be specified when `operator` is 'In' or 'NotIn'"},
		{"spec: {minReadySeconds: -1}", "spec.minReadySeconds: Invalid value: -1: must be greater than or equal to 0"},
		{"spec: {revisionHistoryLimit: -1}", map[bool]string{ // Kubernetes accepts any limit of a StatefulSet
			false: "spec.revisionHistoryLimit: Invalid value: -1: must be greater than or equal to 0"}[kind == "statefulset"]},
		{"spec: {template: {spec: {restartPolicy: Never}}}", `spec.template.spec.restartPolicy: Unsupported value: "Never": supported values: "Always"`},
		{"spec: {template: {spec: {activeDeadlineSeconds: 5}}}", "spec.template.spec.activeDeadlineSeconds: Forbidden: activeDeadlineSeconds in "},
		{"spec: {template: {spec: {containers: null}}}", "spec.template.spec.containers: Required value"},
		{"spec: {template: {spec: {containers: [{name: c}]}}}", "spec.template.spec.containers[0].image: Required value"},
		{"spec: {template: {spec: {containers: [{name: C_, image: i}]}}}", "spec.template.spec.containers[0].name: Invalid value"},
		{"spec: {template: {spec: {dnsPolicy: Any}}}", `spec.template.spec.dnsPolicy: Unsupported value: "Any"`},
		{"spec: {template: {metadata: {annotations: {a b: c}}}}", `spec.template.annotations: Invalid value: "a b"`},
	}
}

func TestStatefulSetValidation(t *testing.T) {
	const update, claims = "spec.updateStrategy", "spec.volumeClaimTemplates[0]"
	claim := func(s string) string { return "spec: {volumeClaimTemplates: [" + s + "]}" }
	kindstest.CheckRejected[*appsv1.StatefulSet](t, "{metadata: {name: a}, spec: {"+kindstest.LastingTemplate+"}}", append(lastingWrongs("statefulset"), []kindstest.InvalidPatch{
		{"metadata: {name: a.b}", `metadata.name: Invalid value: "a.b": must not contain dots`},
		{"spec: {replicas: -1}", "spec.replicas: Invalid value: -1: must be greater than or equal to 0"},
		{"spec: {podManagementPolicy: Random}", `spec.podManagementPolicy: Invalid value: "Random": must be 'OrderedReady' or 'Parallel'`},
		{"spec: {updateStrategy: {type: Never}}", update + `: Invalid value: {"type":"Never"}: must be 'RollingUpdate' or 'OnDelete'`},
		{"spec: {updateStrategy: {type: OnDelete, rollingUpdate: {partition: 1}}}", update + `.rollingUpdate: Invalid value: {"partition":1}: only allowed for updateStrategy 'RollingUpdate'`},
		{"spec: {updateStrategy: {rollingUpdate: {partition: -1}}}", update + ".rollingUpdate.partition: Invalid value: -1: must be greater than or equal to 0"},
		{"spec: {updateStrategy: {rollingUpdate: {maxUnavailable: 0}}}", update + ".rollingUpdate.maxUnavailable: Invalid value: \"0\": cannot be 0"},
		{"spec: {updateStrategy: {rollingUpdate: {maxUnavailable: 101%}}}", update + ".rollingUpdate.maxUnavailable: Invalid value: \"101%\": must not be greater than 100%"},
		{"spec: {updateStrategy: {rollingUpdate: {maxUnavailable: some}}}", update + ".rollingUpdate.maxUnavailable: Invalid value: \"some\""},
		{"spec: {ordinals: {start: -1}}", "spec.ordinals.start: Invalid value: -1: must be greater than or equal to 0"},
		{"spec: {persistentVolumeClaimRetentionPolicy: {whenDeleted: Keep}}", `spec.persistentVolumeClaimRetentionPolicy.whenDeleted: Unsupported value: "Keep": supported values: "Retain", "Delete"`},
		{"spec: {persistentVolumeClaimRetentionPolicy: {whenScaled: Keep}}", `spec.persistentVolumeClaimRetentionPolicy.whenScaled: Unsupported value: "Keep": supported values: "Retain", "Delete"`},
		{claim("{spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}"), claims + ".metadata.name: Required value"},
		{claim("{metadata: {name: v}, spec: {accessModes: [ReadWriteOnce]}}"), claims + ".spec.resources[storage]: Required value"},
		{claim("{metadata: {name: v}, spec: {resources: {requests: {storage: 1Gi}}}}"), claims + ".spec.accessModes: Required value"},
		{"spec: {template: {spec: {containers: [{name: c, image: i, volumeMounts: [{name: v, mountPath: /v}]}]}}}", `spec.template.spec.containers[0].volumeMounts[0].name: Not found: "v"`},
	}...))
	kindstest.CheckRejected[*appsv1.StatefulSet](t, "{metadata: {name: a}, spec: {"+strings.Replace(kindstest.LastingTemplate, "image: i", "image: i, volumeMounts: [{name: v, mountPath: /v}]", 1)+
		", volumeClaimTemplates: [{metadata: {name: v}, spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}]}}", nil)
}

func TestDaemonSetValidation(t *testing.T) {
	const update = "spec.updateStrategy.rollingUpdate"
	rolling := func(s string) string { return "spec: {updateStrategy: {rollingUpdate: {" + s + "}}}" }
	kindstest.CheckRejected[*appsv1.DaemonSet](t, "{metadata: {name: a}, spec: {"+kindstest.LastingTemplate+"}}", append(lastingWrongs("daemonset"), []kindstest.InvalidPatch{
		{"spec: {updateStrategy: {type: Never}}", `spec.updateStrategy.type: Unsupported value: "Never": supported values: "RollingUpdate", "OnDelete"`},
		{rolling("maxUnavailable: -1"), update + ".maxUnavailable: Invalid value: -1: must be greater than or equal to 0"},
		{rolling("maxUnavailable: 200%"), update + `.maxUnavailable: Invalid value: "200%": must not be greater than 100%`},
		{rolling("maxUnavailable: 0"), update + ".maxUnavailable: Required value: cannot be 0 when maxSurge is 0"},
		{rolling("maxUnavailable: 0%"), update + ".maxUnavailable: Required value: cannot be 0 when maxSurge is 0"},
		{rolling("maxSurge: 1"), update + `.maxSurge: Invalid value: "1": may not be set when maxUnavailable is non-zero`},
		{rolling("maxUnavailable: 0, maxSurge: -1"), update + ".maxSurge: Invalid value: -1: must be greater than or equal to 0"},
		{rolling("maxUnavailable: 0, maxSurge: 101%"), update + `.maxSurge: Invalid value: "101%": must not be greater than 100%`},
		{rolling("maxUnavailable: few"), update + `.maxUnavailable: Invalid value: "few"`},
	}...))
	kindstest.CheckRejected[*appsv1.DaemonSet](t, "{metadata: {name: a}, spec: {"+kindstest.LastingTemplate+", updateStrategy: {type: OnDelete}}}", nil)
	kindstest.CheckRejected[*appsv1.DaemonSet](t, "{metadata: {name: a}, spec: {"+kindstest.LastingTemplate+", updateStrategy: {rollingUpdate: {maxUnavailable: 0, maxSurge: 10%}}}}", nil)
}
