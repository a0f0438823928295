package apps_test

import (
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// lastingWrongs returns the errors that every kind with long-running pods can have.
func lastingWrongs(kind string) []kindstest.InvalidPatch {
	return []kindstest.InvalidPatch{
		{Patch: "metadata: {name: A_b}", Want: `metadata.name: Invalid value: "A_b"`},
		{Patch: "metadata: {labels: {a b: c}}", Want: `metadata.labels: Invalid value: "a b"`},
		{Patch: "spec: {selector: null}",
			Want: map[string]string{"statefulset": "spec.selector: Required value; "}[kind] +
				"spec.template.metadata.labels: Invalid value: {\"a\":\"b\"}: `selector` does not match " +
				"template `labels`"},
		{Patch: "spec: {selector: {matchLabels: null}}",
			Want: "spec.selector: Invalid value: {}: empty selector is invalid for " + kind},
		{Patch: "spec: {selector: {matchLabels: {a: c}}}",
			Want: "spec.template.metadata.labels: Invalid value: {\"a\":\"b\"}: `selector` does not match " +
				"template `labels`"},
		{Patch: "spec: {selector: {matchExpressions: [{key: a, operator: Near}]}}",
			Want: "spec.selector.matchExpressions[0].operator: Invalid value: \"Near\": not a valid selector operator"},
		{Patch: "spec: {selector: {matchExpressions: [{key: a, operator: In}]}}",
			Want: "spec.selector.matchExpressions[0].values: Required value: must be specified when `operator` is " +
				"'In' or 'NotIn'"},
		{Patch: "spec: {minReadySeconds: -1}",
			Want: "spec.minReadySeconds: Invalid value: -1: must be greater than or equal to 0"},
		{Patch: "spec: {revisionHistoryLimit: -1}", Want: map[bool]string{
			// Kubernetes accepts any limit of a StatefulSet
			false: "spec.revisionHistoryLimit: Invalid value: -1: must be greater than or equal to 0"}[kind ==
			"statefulset"]},
		{Patch: "spec: {template: {spec: {restartPolicy: Never}}}",
			Want: `spec.template.spec.restartPolicy: Unsupported value: "Never": supported values: "Always"`},
		{Patch: "spec: {template: {spec: {activeDeadlineSeconds: 5}}}",
			Want: "spec.template.spec.activeDeadlineSeconds: Forbidden: activeDeadlineSeconds in "},
		{Patch: "spec: {template: {spec: {containers: null}}}", Want: "spec.template.spec.containers: Required value"},
		{Patch: "spec: {template: {spec: {containers: [{name: c}]}}}",
			Want: "spec.template.spec.containers[0].image: Required value"},
		{Patch: "spec: {template: {spec: {containers: [{name: C_, image: i}]}}}",
			Want: "spec.template.spec.containers[0].name: Invalid value"},
		{Patch: "spec: {template: {spec: {dnsPolicy: Any}}}",
			Want: `spec.template.spec.dnsPolicy: Unsupported value: "Any"`},
		{Patch: "spec: {template: {metadata: {annotations: {a b: c}}}}",
			Want: `spec.template.annotations: Invalid value: "a b"`},
	}
}

func TestStatefulSetValidation(t *testing.T) {
	const update, claims = "spec.updateStrategy", "spec.volumeClaimTemplates[0]"
	claim := func(s string) string { return "spec: {volumeClaimTemplates: [" + s + "]}" }
	kindstest.CheckRejected[*appsv1.StatefulSet](t, "{metadata: {name: a}, spec: {"+kindstest.LastingTemplate+"}}",
		append(lastingWrongs("statefulset"), []kindstest.InvalidPatch{
			{Patch: "metadata: {name: a.b}", Want: `metadata.name: Invalid value: "a.b": must not contain dots`},
			{Patch: "spec: {replicas: -1}",
				Want: "spec.replicas: Invalid value: -1: must be greater than or equal to 0"},
			{Patch: "spec: {podManagementPolicy: Random}",
				Want: `spec.podManagementPolicy: Invalid value: "Random": must be 'OrderedReady' or 'Parallel'`},
			{Patch: "spec: {updateStrategy: {type: Never}}",
				Want: update + `: Invalid value: {"type":"Never"}: must be 'RollingUpdate' or 'OnDelete'`},
			{Patch: "spec: {updateStrategy: {type: OnDelete, rollingUpdate: {partition: 1}}}",
				Want: update + `.rollingUpdate: Invalid value: {"partition":1}: only allowed for updateStrategy ` +
					`'RollingUpdate'`},
			{Patch: "spec: {updateStrategy: {rollingUpdate: {partition: -1}}}",
				Want: update + ".rollingUpdate.partition: Invalid value: -1: must be greater than or equal to 0"},
			{Patch: "spec: {updateStrategy: {rollingUpdate: {maxUnavailable: 0}}}",
				Want: update + ".rollingUpdate.maxUnavailable: Invalid value: \"0\": cannot be 0"},
			{Patch: "spec: {updateStrategy: {rollingUpdate: {maxUnavailable: 101%}}}",
				Want: update + ".rollingUpdate.maxUnavailable: Invalid value: \"101%\": must not be greater than 100%"},
			{Patch: "spec: {updateStrategy: {rollingUpdate: {maxUnavailable: some}}}",
				Want: update + ".rollingUpdate.maxUnavailable: Invalid value: \"some\""},
			{Patch: "spec: {ordinals: {start: -1}}",
				Want: "spec.ordinals.start: Invalid value: -1: must be greater than or equal to 0"},
			{Patch: "spec: {persistentVolumeClaimRetentionPolicy: {whenDeleted: Keep}}",
				Want: `spec.persistentVolumeClaimRetentionPolicy.whenDeleted: Unsupported value: "Keep": supported ` +
					`values: "Retain", "Delete"`},
			{Patch: "spec: {persistentVolumeClaimRetentionPolicy: {whenScaled: Keep}}",
				Want: `spec.persistentVolumeClaimRetentionPolicy.whenScaled: Unsupported value: "Keep": supported ` +
					`values: "Retain", "Delete"`},
			{Patch: claim("{spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}"),
				Want: claims + ".metadata.name: Required value"},
			{Patch: claim("{metadata: {name: v}, spec: {accessModes: [ReadWriteOnce]}}"),
				Want: claims + ".spec.resources[storage]: Required value"},
			{Patch: claim("{metadata: {name: v}, spec: {resources: {requests: {storage: 1Gi}}}}"),
				Want: claims + ".spec.accessModes: Required value"},
			{Patch: "spec: {template: {spec: {containers: [{name: c, image: i, volumeMounts: [{name: v, mountPath: " +
				"/v}]}]}}}", Want: `spec.template.spec.containers[0].volumeMounts[0].name: Not found: "v"`},
		}...))
	kindstest.CheckRejected[*appsv1.StatefulSet](t,
		"{metadata: {name: a}, spec: {"+strings.Replace(kindstest.LastingTemplate, "image: i",
			"image: i, volumeMounts: [{name: v, mountPath: /v}]", 1)+
			", volumeClaimTemplates: [{metadata: {name: v}, spec: {accessModes: [ReadWriteOnce], "+
			"resources: {requests: "+
			"{storage: 1Gi}}}}]}}", nil)
}

func TestDaemonSetValidation(t *testing.T) {
	const update = "spec.updateStrategy.rollingUpdate"
	rolling := func(s string) string { return "spec: {updateStrategy: {rollingUpdate: {" + s + "}}}" }
	kindstest.CheckRejected[*appsv1.DaemonSet](t, "{metadata: {name: a}, spec: {"+kindstest.LastingTemplate+"}}",
		append(lastingWrongs("daemonset"), []kindstest.InvalidPatch{
			{Patch: "spec: {updateStrategy: {type: Never}}",
				Want: `spec.updateStrategy.type: Unsupported value: "Never": supported values: ` +
					`"RollingUpdate", "OnDelete"`},
			{Patch: rolling("maxUnavailable: -1"), Want: update +
				".maxUnavailable: Invalid value: -1: must be greater than or equal to 0"},
			{Patch: rolling("maxUnavailable: 200%"),
				Want: update + `.maxUnavailable: Invalid value: "200%": must not be greater than 100%`},
			{Patch: rolling("maxUnavailable: 0"), Want: update +
				".maxUnavailable: Required value: cannot be 0 when maxSurge is 0"},
			{Patch: rolling("maxUnavailable: 0%"), Want: update +
				".maxUnavailable: Required value: cannot be 0 when maxSurge is 0"},
			{Patch: rolling("maxSurge: 1"), Want: update +
				`.maxSurge: Invalid value: "1": may not be set when maxUnavailable is non-zero`},
			{Patch: rolling("maxUnavailable: 0, maxSurge: -1"),
				Want: update + ".maxSurge: Invalid value: -1: must be greater than or equal to 0"},
			{Patch: rolling("maxUnavailable: 0, maxSurge: 101%"),
				Want: update + `.maxSurge: Invalid value: "101%": must not be greater than 100%`},
			{Patch: rolling("maxUnavailable: few"), Want: update + `.maxUnavailable: Invalid value: "few"`},
		}...))
	kindstest.CheckRejected[*appsv1.DaemonSet](t,
		"{metadata: {name: a}, spec: {"+kindstest.LastingTemplate+", updateStrategy: {type: OnDelete}}}", nil)
	kindstest.CheckRejected[*appsv1.DaemonSet](t,
		"{metadata: {name: a}, spec: {"+kindstest.LastingTemplate+
			", updateStrategy: {rollingUpdate: {maxUnavailable: 0, maxSurge: 10%}}}}", nil)
}
