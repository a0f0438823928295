package kinds

import (
	"context"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/randfill"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/batch"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// patchedOnto is a document with a patch upon it: maps are merged, null removes, the rest is put in place.
func patchedOnto(t *testing.T, base, patch string) string {
	t.Helper()
	var a, b map[string]any
	if err := yaml.Unmarshal([]byte(base), &a); err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal([]byte("{"+patch+"}"), &b); err != nil {
		t.Fatalf("%v in %s", err, patch)
	}
	var merge func(a, b map[string]any)
	merge = func(a, b map[string]any) {
		for k, v := range b {
			under, both := a[k].(map[string]any)
			over, maps := v.(map[string]any)
			switch {
			case v == nil:
				delete(a, k)
			case both && maps:
				merge(under, over)
			default:
				a[k] = v
			}
		}
	}
	merge(a, b)
	out, err := yaml.Marshal(a)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// wrong is a change of a valid object, and the errors that it has, apart by "; ".
type wrong struct{ patch, want string }

// rejects judges, as they are before they are stored, objects that are valid but for a patch.
func rejects[P api.Object](t *testing.T, base string, cases []wrong) {
	t.Helper()
	cases = append([]wrong{{"", ""}}, cases...)
	for _, c := range cases {
		o := load[P](t, patchedOnto(t, base, c.patch))
		o.SetUID("u1")
		k := All().ByType(o)
		if k.PrepareCreate != nil {
			k.PrepareCreate(o)
		}
		var want []string
		if c.want != "" {
			want = strings.Split(c.want, "; ")
		}
		has(t, c.patch, k.Validate(o), want...)
	}
}

const lasting = "selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}"

// lastingWrongs are wrong in every kind that keeps pods running.
func lastingWrongs(kind string) []wrong {
	return []wrong{
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
	rejects[*appsv1.StatefulSet](t, "{metadata: {name: a}, spec: {"+lasting+"}}", append(lastingWrongs("statefulset"), []wrong{
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
	rejects[*appsv1.StatefulSet](t, "{metadata: {name: a}, spec: {"+strings.Replace(lasting, "image: i", "image: i, volumeMounts: [{name: v, mountPath: /v}]", 1)+
		", volumeClaimTemplates: [{metadata: {name: v}, spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}]}}", nil)
}

func TestDaemonSetValidation(t *testing.T) {
	const update = "spec.updateStrategy.rollingUpdate"
	rolling := func(s string) string { return "spec: {updateStrategy: {rollingUpdate: {" + s + "}}}" }
	rejects[*appsv1.DaemonSet](t, "{metadata: {name: a}, spec: {"+lasting+"}}", append(lastingWrongs("daemonset"), []wrong{
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
	rejects[*appsv1.DaemonSet](t, "{metadata: {name: a}, spec: {"+lasting+", updateStrategy: {type: OnDelete}}}", nil)
	rejects[*appsv1.DaemonSet](t, "{metadata: {name: a}, spec: {"+lasting+", updateStrategy: {rollingUpdate: {maxUnavailable: 0, maxSurge: 10%}}}}", nil)
}

// endingWrongs are wrong in a job and in the template of one, which stands at the prefix.
func endingWrongs(wrap func(string) string, at string) []wrong {
	indexed := func(more string) string { return wrap("completionMode: Indexed, completions: 3, " + more) }
	rule := func(s string) string { return wrap("podFailurePolicy: {rules: [{" + s + "}]}") }
	codes := func(s string) string { return rule("action: FailJob, onExitCodes: {" + s + "}") }
	met := func(s string) string { return indexed("successPolicy: {rules: [{" + s + "}]}") }
	const neg = ": Invalid value: -1: must be greater than or equal to 0"
	r0 := at + "podFailurePolicy.rules[0]"
	s0 := at + "successPolicy.rules[0]"
	return []wrong{
		{wrap("parallelism: -1"), at + "parallelism" + neg},
		{wrap("completions: -1"), at + "completions" + neg},
		{wrap("backoffLimit: -1"), at + "backoffLimit" + neg},
		{wrap("activeDeadlineSeconds: -1"), at + "activeDeadlineSeconds" + neg},
		{wrap("ttlSecondsAfterFinished: -1"), at + "ttlSecondsAfterFinished" + neg},
		{wrap("managedBy: me"), at + `managedBy: Invalid value: "me": must be a domain-prefixed path`},
		{wrap("managedBy: example.com/" + strings.Repeat("a", 60)), at + "managedBy: Too long: may not be more than 63 bytes"},
		{wrap("completionMode: Some"), at + `completionMode: Unsupported value: "Some": supported values: "NonIndexed", "Indexed"`},
		{wrap("backoffLimitPerIndex: 1"), at + "backoffLimitPerIndex: Invalid value: 1: requires indexed completion mode"},
		{indexed("maxFailedIndexes: 1"), at + "backoffLimitPerIndex: Required value: when maxFailedIndexes is specified"},
		{indexed("backoffLimitPerIndex: 1, maxFailedIndexes: 4"), at + "maxFailedIndexes: Invalid value: 4: must be less than or equal to completions"},
		{indexed("parallelism: 100001"), at + "parallelism: Invalid value: 100001: must be less than or equal to 100000 when completion mode is Indexed"},
		{wrap("podReplacementPolicy: Soon"), at + `podReplacementPolicy: Unsupported value: "Soon": supported values: "Failed", "TerminatingOrFailed"`},
		{wrap("template: {spec: {restartPolicy: Always}}"), at + `template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"`},
		{rule("action: FailJob"), r0 + ": Invalid value: specifying one of OnExitCodes and OnPodConditions is required"},
		{rule("action: FailIndex, onPodConditions: [{type: A}]"), r0 + `.action: Invalid value: "FailIndex": requires the backoffLimitPerIndex to be set`},
		{rule("action: Cry, onPodConditions: [{type: A}]"), r0 + `.action: Unsupported value: "Cry": supported values: "Count", "FailIndex", "FailJob", "Ignore"`},
		{rule("onPodConditions: [{type: A}]"), r0 + `.action: Required value: valid values: ["Count" "FailIndex" "FailJob" "Ignore"]`},
		{rule("action: Count, onPodConditions: [{type: A, status: Maybe}]"), r0 + `.onPodConditions[0].status: Unsupported value: "Maybe": supported values: "False", "True", "Unknown"`},
		{rule("action: Count, onPodConditions: [{type: A}], onExitCodes: {operator: In, values: [1]}"), r0 + ": Invalid value: specifying both OnExitCodes and OnPodConditions is not supported"},
		{codes("operator: In"), r0 + ".onExitCodes.values: Invalid value: null: at least one value is required"},
		{codes("operator: In, values: [0]"), r0 + ".onExitCodes.values[0]: Invalid value: 0: must not be 0 for the In operator"},
		{codes("operator: In, values: [1, 1]"), r0 + ".onExitCodes.values[1]: Duplicate value: 1"},
		{codes("operator: In, values: [2, 1]"), r0 + ".onExitCodes.values: Invalid value: [2,1]: must be ordered"},
		{codes("operator: Near, values: [1]"), r0 + `.onExitCodes.operator: Unsupported value: "Near": supported values: "In", "NotIn"`},
		{codes("operator: In, values: [1], containerName: other"), r0 + `.onExitCodes.containerName: Invalid value: "other": must be one of the container or initContainer names in the pod template`},
		{wrap("successPolicy: {rules: [{succeededCount: 1}]}"), at + "successPolicy: Invalid value"},
		{indexed("successPolicy: {}"), at + "successPolicy.rules: Required value: at least one rules must be specified when the successPolicy is specified"},
		{met(""), s0 + ": Required value: at least one of succeededCount or succeededIndexes must be specified"},
		{met("succeededCount: 4"), s0 + ".succeededCount: Invalid value: 4: must be less than or equal to 3 (the number of specified completions)"},
		{met("succeededIndexes: '5'"), s0 + `.succeededIndexes: Invalid value: "5": error parsing succeededIndexes: too large index: "5"`},
		{met("succeededIndexes: '1,0'"), s0 + `.succeededIndexes: Invalid value: "1,0": error parsing succeededIndexes: non-increasing order, previous: 1, current: 0`},
		{met("succeededIndexes: '0-1', succeededCount: 3"), s0 + ".succeededCount: Invalid value: 3: must be less than or equal to 2 (the number of indexes in the specified succeededIndexes field)"},
	}
}

const ending = "template: {spec: {restartPolicy: Never, containers: [{name: c, image: i}]}}"

func TestJobValidation(t *testing.T) {
	spec := func(s string) string { return "spec: {" + s + "}" }
	rejects[*batchv1.Job](t, "{metadata: {name: a}, spec: {"+ending+"}}", append(endingWrongs(spec, "spec."), []wrong{
		{"metadata: {name: A}", `metadata.name: Invalid value: "A"`},
		{spec("selector: {matchLabels: {a: b}}"), "spec.selector: Invalid value; spec.template.metadata.labels: Invalid value"},
		{spec("template: {metadata: {labels: {job-name: other}}}"), "spec.template.metadata.labels[job-name]: Invalid value"},
		{spec("manualSelector: true"), "spec.selector: Required value; spec.template.metadata.labels: Invalid value: null: `selector` does not match template `labels`"},
		{"metadata: {name: " + strings.Repeat("a", 63) + "}, " + spec("completionMode: Indexed, completions: 10"), "metadata.name: Invalid value: \"" + strings.Repeat("a", 63) + "\": will not able to create pod with invalid DNS label"},
	}...))
	rejects[*batchv1.Job](t, "{metadata: {name: a}, spec: {manualSelector: true, selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {restartPolicy: Never, containers: [{name: c, image: i}]}}}}", nil)
}

func TestCronJobValidation(t *testing.T) {
	job := func(s string) string { return "spec: {jobTemplate: {spec: {" + s + "}}}" }
	zone := func(s string) wrong {
		return wrong{"spec: {timeZone: " + s + "}", "spec.timeZone: Invalid value: \"" + s + "\": "}
	}
	at := func(s string) wrong {
		return wrong{"spec: {schedule: '" + s + "'}", "spec.schedule: Invalid value: \"" + s + "\": "}
	}
	rejects[*batchv1.CronJob](t, "{metadata: {name: a}, spec: {schedule: '* * * * *', jobTemplate: {spec: {"+ending+"}}}}",
		append(endingWrongs(job, "spec.jobTemplate.spec."), []wrong{
			{"metadata: {name: " + strings.Repeat("a", 53) + "}", "metadata.name: Invalid value: \"" + strings.Repeat("a", 53) + "\": must be no more than 52 characters"},
			{"spec: {schedule: ''}", "spec.schedule: Required value"},
			at("* * * *"), at("60 * * * *"), at("@often"), at("a b c d e"),
			{"spec: {schedule: 'TZ=UTC 0 * * * *'}", "spec.schedule: Invalid value: \"TZ=UTC 0 * * * *\": cannot use TZ or CRON_TZ in schedule, use timeZone field instead"},
			{"spec: {schedule: TZ=UTC}", "spec.schedule: Invalid value; spec.schedule: Invalid value"},
			zone("Nowhere/Town"), zone("../etc"), zone("Local"), zone("UTC/"),
			{"spec: {timeZone: ''}", "spec.timeZone: Invalid value: \"\": timeZone must be nil or non-empty string"},
			{"spec: {concurrencyPolicy: Maybe}", `spec.concurrencyPolicy: Unsupported value: "Maybe": supported values: "Allow", "Forbid", "Replace"`},
			{"spec: {startingDeadlineSeconds: -1}", "spec.startingDeadlineSeconds: Invalid value: -1"},
			{"spec: {successfulJobsHistoryLimit: -1}", "spec.successfulJobsHistoryLimit: Invalid value: -1"},
			{"spec: {failedJobsHistoryLimit: -1}", "spec.failedJobsHistoryLimit: Invalid value: -1"},
			{job("selector: {matchLabels: {a: b}}"), "spec.jobTemplate.spec.selector: Invalid value: {\"matchLabels\":{\"a\":\"b\"}}: `selector` will be auto-generated"},
			{job("manualSelector: true"), `spec.jobTemplate.spec.manualSelector: Unsupported value: true: supported values: "nil", "false"`},
		}...))
	rejects[*batchv1.CronJob](t, "{metadata: {name: a}, spec: {schedule: '@daily', timeZone: Europe/Berlin, jobTemplate: {spec: {"+ending+"}}}}", nil)
}

func autoscalerWrongs() []wrong {
	metric := func(s string) string { return "spec: {metrics: [{" + s + "}]}" }
	target := func(s string) string {
		return metric("type: Resource, resource: {name: cpu, target: {" + s + "}}")
	}
	rules := func(s string) string { return "spec: {behavior: {scaleUp: {" + s + "}}}" }
	policy := func(s string) string { return rules("policies: [{" + s + "}]") }
	const m0, up = "spec.metrics[0].", "spec.behavior.scaleUp."
	return []wrong{
		{"spec: {minReplicas: 0}", "spec.metrics: Forbidden: must specify at least one Object or External metric to support scaling to zero replicas"},
		{"spec: {minReplicas: -1}", "spec.minReplicas: Invalid value: -1: must be greater than or equal to 0"},
		{"spec: {maxReplicas: -1}", "spec.maxReplicas: Invalid value: -1: must be greater than or equal to 1; spec.maxReplicas: Invalid value: -1: must be greater than or equal to `minReplicas`"},
		{"spec: {maxReplicas: 0}", "spec.maxReplicas: Required value: must be set and greater than 0; spec.maxReplicas: Invalid value: 0: must be greater than or equal to `minReplicas`"},
		{"spec: {minReplicas: 3}", "spec.maxReplicas: Invalid value: 2: must be greater than or equal to `minReplicas`"},
		{"spec: {scaleTargetRef: {kind: null}}", "spec.scaleTargetRef.kind: Required value"},
		{"spec: {scaleTargetRef: {name: null}}", "spec.scaleTargetRef.name: Required value"},
		{"spec: {scaleTargetRef: {name: a/b}}", `spec.scaleTargetRef.name: Invalid value: "a/b": may not contain '/'`},
		{metric("type: ''"), m0 + "type: Required value: must specify a metric source type; " + m0 + `type: Unsupported value: ""`},
		{metric("type: Guess"), m0 + `type: Unsupported value: "Guess": supported values: "ContainerResource", "External", "Object", "Pods", "Resource"`},
		{metric("type: Resource"), m0 + "resource: Required value: must populate information for the given metric source"},
		{metric("type: Resource, resource: {name: cpu, target: {type: Utilization, averageUtilization: 1}}, pods: {metric: {name: a}, target: {type: AverageValue, averageValue: 1}}"),
			m0 + "pods: Forbidden: must populate the given metric source only"},
		{metric("type: Resource, resource: {target: {type: Utilization, averageUtilization: 1}}"), m0 + "resource.name: Required value: must specify a resource name"},
		{target("averageUtilization: 1"), m0 + "resource.target.type: Required value: must specify a metric target type; " + m0 + "resource.target.type: Invalid value: \"\": must be either Utilization, Value, or AverageValue"},
		{target("type: Utilization, averageUtilization: 0"), m0 + "resource.target.averageUtilization: Invalid value: 0: must be greater than 0"},
		{target("type: AverageValue, averageValue: 0"), m0 + `resource.target.averageValue: Invalid value: "0": must be positive`},
		{target("type: Utilization"), m0 + "resource.target.averageUtilization: Required value: must set either a target raw value or a target utilization"},
		{target("type: Utilization, averageUtilization: 1, averageValue: 1"), m0 + "resource.target.averageValue: Forbidden: may not set both a target raw value and a target utilization"},
		{metric("type: Pods, pods: {metric: {name: ''}, target: {type: AverageValue, averageValue: 1}}"), m0 + "pods.metric.name: Required value: must specify a metric name"},
		{metric("type: Pods, pods: {metric: {name: a}, target: {type: Value, value: 1}}"), m0 + "pods.target.averageValue: Required value: must specify a positive target averageValue"},
		{metric("type: External, external: {metric: {name: a}, target: {type: Value}}"), m0 + "external.target.averageValue: Required value: must set either a target value for metric or a per-pod target"},
		{metric("type: External, external: {metric: {name: a}, target: {type: Value, value: 1, averageValue: 1}}"), m0 + "external.target.value: Forbidden: may not set both a target value for metric and a per-pod target"},
		{metric("type: Object, object: {describedObject: {kind: A, name: b}, metric: {name: a}, target: {type: Value}}"), m0 + "object.target.averageValue: Required value: must set either a target value or averageValue"},
		{metric("type: Object, object: {describedObject: {name: b}, metric: {name: a}, target: {type: Value, value: 1}}"), m0 + "object.describedObject.kind: Required value"},
		{metric("type: ContainerResource, containerResource: {name: cpu, target: {type: Utilization, averageUtilization: 1}}"), m0 + "containerResource.container: Required value: must specify a container"},
		{metric("type: ContainerResource, containerResource: {name: disk, container: c, target: {type: Utilization, averageUtilization: 1}}"), m0 + `containerResource.name: Invalid value: "disk": must be a standard resource type or fully qualified; ` +
			m0 + `containerResource.name: Invalid value: "disk": must be a standard resource for containers`},
		{rules("stabilizationWindowSeconds: -1"), up + "stabilizationWindowSeconds: Invalid value: -1: must be greater than or equal to zero"},
		{rules("stabilizationWindowSeconds: 3601"), up + "stabilizationWindowSeconds: Invalid value: 3601: must be less than or equal to 3600"},
		{rules("selectPolicy: Any"), up + `selectPolicy: Unsupported value: "Any": supported values: "Disabled", "Max", "Min"`},
		{rules("policies: []"), up + "policies: Required value: must specify at least one Policy"},
		{rules("tolerance: -1"), up + `tolerance: Invalid value: "-1": must be greater than or equal to 0`},
		{policy("type: Steps, value: 1, periodSeconds: 1"), up + `policies[0].type: Unsupported value: "Steps": supported values: "Percent", "Pods"`},
		{policy("type: Pods, value: 0, periodSeconds: 1"), up + "policies[0].value: Invalid value: 0: must be greater than zero"},
		{policy("type: Pods, value: 1, periodSeconds: 0"), up + "policies[0].periodSeconds: Invalid value: 0: must be greater than zero"},
		{policy("type: Pods, value: 1, periodSeconds: 1801"), up + "policies[0].periodSeconds: Invalid value: 1801: must be less than or equal to 1800"},
	}
}

const autoscaler = "{metadata: {name: a}, spec: {maxReplicas: 2, scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: d}}}"

func TestAutoscalerValidation(t *testing.T) {
	rejects[*autoscalingv2.HorizontalPodAutoscaler](t, autoscaler, autoscalerWrongs())
	rejects[*autoscalingv1.HorizontalPodAutoscaler](t, autoscaler, []wrong{
		{"spec: {minReplicas: 0}", "spec.metrics: Forbidden: must specify at least one Object or External metric to support scaling to zero replicas"},
		{"spec: {targetCPUUtilizationPercentage: 0}", "spec.metrics[0].resource.target.averageUtilization: Invalid value: 0: must be greater than 0"},
		{"metadata: {annotations: {autoscaling.alpha.kubernetes.io/metrics: '['}}", "metadata.annotations: Invalid value: autoscaling.alpha.kubernetes.io/metrics: unexpected end of JSON input"},
		{`metadata: {annotations: {autoscaling.alpha.kubernetes.io/metrics: '[{"type":"Pods"}]'}}`, "spec.metrics[0].pods: Required value"},
		{`metadata: {annotations: {autoscaling.alpha.kubernetes.io/behavior: '{"ScaleUp":{}}'}}`, "spec.behavior.scaleUp.policies: Required value"},
	})
}

func TestSmallKindsValidation(t *testing.T) {
	limit := func(s string) string { return "spec: {limits: [{type: Container, " + s + "}]}" }
	const l0 = "spec.limits[0]."
	rejects[*corev1.LimitRange](t, "{metadata: {name: a}, spec: {limits: [{type: Container, max: {cpu: 1}}]}}", []wrong{
		{"spec: {limits: [{type: Thing}]}", l0 + `type: Invalid value: "Thing": must be a standard limit type or fully qualified`},
		{"spec: {limits: [{type: Pod}, {type: Pod}]}", `spec.limits[1].type: Duplicate value: "Pod"`},
		{"spec: {limits: [{type: Pod, default: {cpu: 1}}]}", l0 + "default: Forbidden: may not be specified when `type` is 'Pod'"},
		{"spec: {limits: [{type: Pod, defaultRequest: {cpu: 1}}]}", l0 + "defaultRequest: Forbidden: may not be specified when `type` is 'Pod'"},
		{"spec: {limits: [{type: PersistentVolumeClaim}]}", l0 + "limits: Required value: either minimum or maximum storage value is required, but neither was provided"},
		{"spec: {limits: [{type: Pod, min: {cpu: 2}, max: {cpu: 1}}]}", l0 + `min[cpu]: Invalid value: "2": min value 2 is greater than max value 1`},
		{limit("max: {disk: 1}"), l0 + `max[disk]: Invalid value: "disk"; ` + l0 + `max[disk]: Invalid value: "disk": must be a standard resource for containers; ` +
			l0 + `default[disk]: Invalid value; ` + l0 + `default[disk]: Invalid value; ` +
			l0 + `defaultRequest[disk]: Invalid value; ` + l0 + `defaultRequest[disk]: Invalid value`},
		{limit("default: {cpu: 1}, defaultRequest: {cpu: 2}"), l0 + `defaultRequest[cpu]: Invalid value: "2": default request value 2 is greater than default limit value 1`},
		{limit("maxLimitRequestRatio: {cpu: 500m}"), l0 + `maxLimitRequestRatio[cpu]: Invalid value: "500m": ratio 500m is less than 1`},
		{"spec: {limits: [{type: Pod, min: {cpu: 1}, max: {cpu: 2}, maxLimitRequestRatio: {cpu: 3}}]}", l0 + `maxLimitRequestRatio[cpu]: Invalid value: "3": ratio 3 is greater than max/min = 2.000000`},
	})
	quota := func(s string) string { return "spec: {hard: {" + s + "}}" }
	selected := func(s string) string { return "spec: {scopeSelector: {matchExpressions: [{" + s + "}]}}" }
	const expressions = "spec.scopeSelector.matchExpressions"
	rejects[*corev1.ResourceQuota](t, "{metadata: {name: a}, spec: {hard: {pods: 1}}}", []wrong{
		{quota("pods: -1"), `spec.hard[pods]: Invalid value: "-1": must be greater than or equal to 0`},
		{quota("pods: 500m"), `spec.hard[pods]: Invalid value: "500m": must be an integer`},
		{quota("things: 1"), `spec.hard[things]: Invalid value: "things": must be a standard resource type or fully qualified; spec.hard[things]: Invalid value: "things": must be a standard resource for quota`},
		{quota("a b: 1"), `spec.hard[a b]: Invalid value: "a b": name part must consist of; spec.hard[a b]: Invalid value: "a b": must be a standard resource for quota`},
		{"spec: {scopes: [Sometimes]}", `spec.scopes: Invalid value: ["Sometimes"]: unsupported scope`},
		{"spec: {scopes: [BestEffort, NotBestEffort]}", `spec.scopes: Invalid value: ["BestEffort","NotBestEffort"]: conflicting scopes`},
		{"spec: {scopes: [BestEffort], hard: {limits.cpu: 1}}", `spec.scopes: Invalid value: ["BestEffort"]: unsupported scope applied to resource`},
		{selected("scopeName: PriorityClass, operator: In"), expressions + ".values: Required value: must be at least one value when `operator` is 'In' or 'NotIn' for scope selector"},
		{selected("scopeName: PriorityClass, operator: Exists, values: [a]"), expressions + `.values: Invalid value: ["a"]: must be no value`},
		{selected("scopeName: BestEffort, operator: In, values: [a]"), expressions + `.operator: Invalid value: "In": must be 'Exists' when scope is any of`},
		{selected("scopeName: PriorityClass, operator: Near"), expressions + `.operator: Invalid value: "Near": not a valid selector operator`},
	})
	rejects[*corev1.ReplicationController](t, "{metadata: {name: a}, spec: {selector: {a: b}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}", []wrong{
		{"metadata: {name: A}", `metadata.name: Invalid value: "A"`},
		{"spec: {replicas: -1}", "spec.replicas: Invalid value: -1"},
		{"spec: {minReadySeconds: -1}", "spec.minReadySeconds: Invalid value: -1"},
		{"spec: {selector: {a: c}}", "spec.template.metadata.labels: Invalid value: {\"a\":\"b\"}: `selector` does not match template `labels`"},
		{"spec: {template: null}", "spec.template: Required value"},
		{"spec: {template: null, selector: null}", "spec.selector: Required value; spec.template: Required value"},
		{"spec: {template: {spec: {restartPolicy: Never}}}", `spec.template.spec.restartPolicy: Unsupported value: "Never": supported values: "Always"`},
		{"spec: {template: {spec: {activeDeadlineSeconds: 1}}}", "spec.template.spec.activeDeadlineSeconds: Forbidden"},
		{"spec: {template: {spec: {containers: null}}}", "spec.template.spec.containers: Required value"},
	})
	rejects[*appsv1.ControllerRevision](t, "{metadata: {name: a}, data: {a: b}, revision: 1}", []wrong{
		{"data: null", "data: Required value: data is mandatory"},
		{"revision: -1", "revision: Invalid value: -1: must be greater than or equal to 0"},
	})
}

// Each valid autoscaler is as v2 what it was, after it has been v1 for somebody who has not changed it.
func TestAutoscalersConvertWhole(t *testing.T) {
	ctx := context.Background()
	k := All().ByType(&autoscalingv1.HorizontalPodAutoscaler{})
	seen := 0
	for seed := range int64(400) {
		h := &autoscalingv2.HorizontalPodAutoscaler{}
		filler(seed).Funcs(func(q *resource.Quantity, c randfill.Continue) {
			*q = *resource.NewMilliQuantity(c.Int63n(5000)+1, resource.DecimalSI)
		}, metricFill).Fill(h)
		h.Annotations = map[string]string{"mine": "kept"}
		h.Spec.Behavior = nil
		if seed%2 == 0 {
			h.Spec.Behavior = &autoscalingv2.HorizontalPodAutoscalerBehavior{ScaleUp: &autoscalingv2.HPAScalingRules{
				StabilizationWindowSeconds: ptr(int32(seed)), Tolerance: ptr(resource.MustParse("100m")),
			}}
		}
		h.TypeMeta, h.Status.CurrentMetrics = metav1.TypeMeta{}, nil
		for i := range h.Status.Conditions { // times are written to the second
			h.Status.Conditions[i].LastTransitionTime = metav1.NewTime(t0)
		}
		All().ByType(h).Default(h)
		before := h.DeepCopy()
		first, err := k.Conversion.From(ctx, []api.Object{h})
		if err != nil {
			t.Fatal(err)
		}
		back, err := k.Conversion.To(ctx, first[0])
		if err != nil {
			t.Fatal(err)
		}
		if !fieldrules.SemanticEqual(back, before) || !fieldrules.SemanticEqual(h, before) {
			a, _ := yaml.Marshal(before)
			b, _ := yaml.Marshal(back)
			t.Fatalf("seed %d:\n%s\nbecame\n%s", seed, a, b)
		}
		seen += len(h.Spec.Metrics)
	}
	if seen < 400 {
		t.Errorf("%d metrics only were converted", seen)
	}
}

// metricFill makes metrics whose parts belong together.
func metricFill(m *autoscalingv2.MetricSpec, c randfill.Continue) {
	value, share := ptr(*resource.NewQuantity(c.Int63n(100)+1, resource.DecimalSI)), ptr(int32(c.Intn(99)+1))
	id := autoscalingv2.MetricIdentifier{Name: "m", Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}}
	average := autoscalingv2.MetricTarget{Type: autoscalingv2.AverageValueMetricType, AverageValue: value}
	whole := autoscalingv2.MetricTarget{Type: autoscalingv2.ValueMetricType, Value: value}
	used := autoscalingv2.MetricTarget{Type: autoscalingv2.UtilizationMetricType, AverageUtilization: share}
	*m = []autoscalingv2.MetricSpec{
		{Type: "Resource", Resource: &autoscalingv2.ResourceMetricSource{Name: "cpu", Target: used}},
		{Type: "Resource", Resource: &autoscalingv2.ResourceMetricSource{Name: "cpu", Target: average}},
		{Type: "Resource", Resource: &autoscalingv2.ResourceMetricSource{Name: "memory", Target: used}},
		{Type: "ContainerResource", ContainerResource: &autoscalingv2.ContainerResourceMetricSource{Name: "cpu", Container: "c", Target: used}},
		{Type: "Pods", Pods: &autoscalingv2.PodsMetricSource{Metric: id, Target: average}},
		{Type: "External", External: &autoscalingv2.ExternalMetricSource{Metric: id, Target: average}},
		{Type: "External", External: &autoscalingv2.ExternalMetricSource{Metric: id, Target: whole}},
		{Type: "Object", Object: &autoscalingv2.ObjectMetricSource{Metric: id, Target: whole}},
		{Type: "Object", Object: &autoscalingv2.ObjectMetricSource{Metric: id, Target: average}},
	}[c.Intn(9)]
}

// What pods were made by stays; what they can follow may change.
func TestWorkloadUpdates(t *testing.T) {
	set := load[*appsv1.StatefulSet](t, "{metadata: {name: a, generation: 1}, spec: {"+lasting+"}}")
	changes := map[string]func(*appsv1.StatefulSet){
		"": func(s *appsv1.StatefulSet) {
			s.Spec.Replicas = ptr(int32(5))
			s.Spec.Template.Spec.Containers[0].Image = "j"
		},
		"spec": func(s *appsv1.StatefulSet) { s.Spec.ServiceName = "other" },
	}
	for want, change := range changes {
		got, wrong := update(t, set, "", change)
		if strings.Join(wrong, ",") != want || got.Generation != 2 {
			t.Errorf("StatefulSet: %q, want %q, generation %d", wrong, want, got.Generation)
		}
	}
	daemon := load[*appsv1.DaemonSet](t, "{metadata: {name: a, generation: 1}, spec: {"+lasting+"}}")
	All().ByType(daemon).PrepareCreate(daemon)
	got, wrong := update(t, daemon, "", func(d *appsv1.DaemonSet) { d.Spec.Template.Spec.Containers[0].Image = "j" })
	if wrong != nil || got.Annotations[appsv1.DeprecatedTemplateGeneration] != "2" || daemon.Annotations[appsv1.DeprecatedTemplateGeneration] != "1" {
		t.Errorf("DaemonSet: %q, %v", wrong, got.Annotations)
	}
	if _, wrong = update(t, daemon, "", func(d *appsv1.DaemonSet) { d.Spec.Selector = &metav1.LabelSelector{} }); !slices.Equal(wrong, []string{"spec.selector"}) {
		t.Errorf("DaemonSet: %q", wrong)
	}
}

func TestJobUpdates(t *testing.T) {
	stored := func(more string) *batchv1.Job {
		j := load[*batchv1.Job](t, "{metadata: {name: a, generation: 1}, spec: {"+more+ending+"}}")
		j.UID = "u1"
		All().ByType(j).PrepareCreate(j)
		return j
	}
	node := func(j *batchv1.Job) { j.Spec.Template.Spec.NodeSelector = map[string]string{"a": "b"} }
	running := stored("suspend: true, ")
	running.Status.StartTime = ptr(ago(time.Second))
	for _, c := range []struct {
		name   string
		job    *batchv1.Job
		change func(*batchv1.Job)
		want   string
	}{
		{"parallelism", stored(""), func(j *batchv1.Job) { j.Spec.Parallelism = ptr(int32(4)) }, ""},
		{"completions", stored(""), func(j *batchv1.Job) { j.Spec.Completions = ptr(int32(4)) }, "spec.completions"},
		{"elastic", stored("completionMode: Indexed, completions: 2, "), func(j *batchv1.Job) {
			j.Spec.Completions, j.Spec.Parallelism = ptr(int32(4)), ptr(int32(4))
		}, ""},
		{"not in tandem", stored("completionMode: Indexed, completions: 2, "), func(j *batchv1.Job) { j.Spec.Completions = ptr(int32(4)) }, "spec.completions"},
		{"mode", stored(""), func(j *batchv1.Job) { j.Spec.CompletionMode = ptr(batchv1.IndexedCompletion) }, "spec.completionMode"},
		{"manager", stored(""), func(j *batchv1.Job) { j.Spec.ManagedBy = ptr("example.com/x") }, "spec.managedBy"},
		{"template", stored(""), node, "spec.template"},
		{"suspended", stored("suspend: true, "), node, ""},
		{"suspended: resources", stored("suspend: true, "), func(j *batchv1.Job) {
			j.Spec.Template.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"cpu": resource.MustParse("1")}
		}, ""},
		{"suspended: image", stored("suspend: true, "), func(j *batchv1.Job) { j.Spec.Template.Spec.Containers[0].Image = "j" }, "spec.template"},
		{"suspended, but begun", running, node, "spec.template"},
	} {
		if _, wrong := update(t, c.job, "", c.change); strings.Join(wrong, ",") != c.want {
			t.Errorf("%s: %q, want %q", c.name, wrong, c.want)
		}
	}
}

// A job without a selector gets one that no other has; what is the user's stays.
func TestJobSelectsItsPods(t *testing.T) {
	j := load[*batchv1.Job](t, "{metadata: {name: a}, spec: {template: {metadata: {labels: {app: x}}, spec: {restartPolicy: Never, containers: [{name: c, image: i}]}}}}")
	j.UID = "u1"
	All().ByType(j).PrepareCreate(j)
	want := map[string]string{"app": "x", "job-name": "a", "controller-uid": "u1", "batch.kubernetes.io/job-name": "a", "batch.kubernetes.io/controller-uid": "u1"}
	if !maps.Equal(j.Spec.Template.Labels, want) || !maps.Equal(j.Labels, want) ||
		!maps.Equal(j.Spec.Selector.MatchLabels, map[string]string{"batch.kubernetes.io/controller-uid": "u1"}) {
		t.Errorf("labels %v and %v, selector %v", j.Spec.Template.Labels, j.Labels, j.Spec.Selector)
	}
}

// What a report may not say of a job: an end without a reason, less than before, another end.
func TestJobStatusUpdates(t *testing.T) {
	j := load[*batchv1.Job](t, "{metadata: {name: a}, spec: {"+ending+"}}")
	condition := func(types ...batchv1.JobConditionType) []batchv1.JobCondition {
		var out []batchv1.JobCondition
		for _, c := range types {
			out = append(out, batchv1.JobCondition{Type: c, Status: corev1.ConditionTrue})
		}
		return out
	}
	done := j.DeepCopy()
	done.Status = batchv1.JobStatus{Succeeded: 1, StartTime: ptr(ago(time.Minute)), CompletionTime: ptr(ago(time.Second)),
		Conditions: condition(batchv1.JobSuccessCriteriaMet, batchv1.JobComplete)}
	for _, c := range []struct {
		name   string
		from   *batchv1.Job
		change func(*batchv1.JobStatus)
		want   string
	}{
		{"complete", j, func(s *batchv1.JobStatus) { *s = done.Status }, ""},
		{"negative", j, func(s *batchv1.JobStatus) { s.Active = -1 }, "status.active: Invalid value: -1: must be greater than or equal to 0"},
		{"no reason", j, func(s *batchv1.JobStatus) {
			s.Conditions, s.StartTime = condition(batchv1.JobFailed), ptr(ago(time.Second))
		},
			"status.conditions: Invalid value: cannot set Failed=True condition without the FailureTarget=true condition"},
		{"no start", j, func(s *batchv1.JobStatus) { s.Conditions = condition(batchv1.JobFailed, batchv1.JobFailureTarget) }, "status.startTime: Required value: startTime is required for finished job"},
		{"indexes", j, func(s *batchv1.JobStatus) { s.CompletedIndexes = "0" }, "status.completedIndexes: Invalid value: \"0\": cannot set non-empty completedIndexes when non-indexed completion mode"},
		{"more ready", j, func(s *batchv1.JobStatus) { s.Ready = ptr(int32(1)) }, "status.ready: Invalid value: 1: cannot set more ready pods than active"},
		{"less", done, func(s *batchv1.JobStatus) { s.Succeeded = 0 }, "status.succeeded: Invalid value: 0: cannot decrease the succeeded counter"},
		{"active", done, func(s *batchv1.JobStatus) { s.Active = 1 }, "status.active: Invalid value: 1: active>0 is invalid for finished job"},
	} {
		now := c.from.DeepCopy()
		c.change(&now.Status)
		var want []string
		if c.want != "" {
			want = []string{c.want}
		}
		has(t, c.name, batch.ValidateJobStatusUpdate(now, c.from), want...)
	}
}

// The start time of a job changes while the job is suspended and when it is resumed, and at no other time. F11
func TestJobStartTimeUpdates(t *testing.T) {
	at := func(n int) *metav1.Time { return ptr(metav1.NewTime(time.Unix(int64(n), 0))) }
	paused := []batchv1.JobCondition{{Type: batchv1.JobSuspended, Status: corev1.ConditionTrue}}
	resumed := []batchv1.JobCondition{{Type: batchv1.JobSuspended, Status: corev1.ConditionFalse}}
	finished := []batchv1.JobCondition{{Type: batchv1.JobSuccessCriteriaMet, Status: corev1.ConditionTrue},
		{Type: batchv1.JobComplete, Status: corev1.ConditionTrue}}
	const immutable = "status.startTime: Invalid value: "
	for _, c := range []struct {
		name, spec string
		was, now   batchv1.JobStatus
		want       string
	}{
		{"running, moved", "", batchv1.JobStatus{StartTime: at(1)}, batchv1.JobStatus{StartTime: at(2)}, immutable},
		{"running, removed", "", batchv1.JobStatus{StartTime: at(1)}, batchv1.JobStatus{}, immutable},
		{"suspended, removed", "suspend: true, ", batchv1.JobStatus{StartTime: at(1)}, batchv1.JobStatus{Conditions: paused}, ""},
		{"resumed", "", batchv1.JobStatus{StartTime: at(1), Conditions: paused},
			batchv1.JobStatus{StartTime: at(2), Conditions: resumed}, ""},
		{"resumed before", "", batchv1.JobStatus{StartTime: at(1), Conditions: resumed},
			batchv1.JobStatus{StartTime: at(2), Conditions: resumed}, immutable},
		{"nothing to do", "suspend: true, completions: 0, ", batchv1.JobStatus{},
			batchv1.JobStatus{Conditions: finished, CompletionTime: at(3)}, ""},
		{"elastic", "completionMode: Indexed, completions: 2, parallelism: 2, ",
			batchv1.JobStatus{Succeeded: 2, CompletedIndexes: "0,1"}, batchv1.JobStatus{Succeeded: 1, CompletedIndexes: "0"}, ""},
		{"not elastic", "completionMode: Indexed, completions: 2, parallelism: 1, ", batchv1.JobStatus{Succeeded: 2, CompletedIndexes: "0,1"},
			batchv1.JobStatus{Succeeded: 1, CompletedIndexes: "0"}, "status.succeeded: "},
	} {
		old := load[*batchv1.Job](t, "{metadata: {name: a}, spec: {"+c.spec+ending+"}}")
		old.Status = c.was
		now := old.DeepCopy()
		now.Status = c.now
		errs := batch.ValidateJobStatusUpdate(now, old)
		if (c.want == "") != (len(errs) == 0) || len(errs) > 0 && !strings.HasPrefix(errs[0].Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, errs, c.want)
		}
	}
}

// What is left out is filled as Kubernetes documents it.
func TestWorkloadDefaults(t *testing.T) {
	const pod = `{restartPolicy: Never, dnsPolicy: ClusterFirst, schedulerName: default-scheduler, securityContext: {}, terminationGracePeriodSeconds: 30,
 containers: [{name: c, image: i, imagePullPolicy: Always, resources: {}, terminationMessagePath: /dev/termination-log, terminationMessagePolicy: File}]}`
	forever := strings.Replace(pod, "Never", "Always", 1)
	defaulted[*batchv1.Job](t, "{metadata: {name: a}, spec: {"+ending+"}}", `{spec: {parallelism: 1, completions: 1, backoffLimit: 6, completionMode: NonIndexed,
 suspend: false, manualSelector: false, podReplacementPolicy: TerminatingOrFailed, template: {metadata: {}, spec: `+pod+"}}}")
	defaulted[*batchv1.CronJob](t, "{metadata: {name: a}, spec: {schedule: '@daily', jobTemplate: {spec: {"+ending+"}}}}",
		`{spec: {schedule: '@daily', concurrencyPolicy: Allow, suspend: false, successfulJobsHistoryLimit: 3, failedJobsHistoryLimit: 1,
 jobTemplate: {metadata: {}, spec: {template: {metadata: {}, spec: `+pod+"}}}}}")
	defaulted[*appsv1.StatefulSet](t, "{metadata: {name: a}, spec: {"+lasting+"}}", `{spec: {replicas: 1, revisionHistoryLimit: 10, serviceName: '',
 podManagementPolicy: OrderedReady, updateStrategy: {type: RollingUpdate, rollingUpdate: {partition: 0, maxUnavailable: 1}},
 persistentVolumeClaimRetentionPolicy: {whenDeleted: Retain, whenScaled: Retain}, selector: {matchLabels: {a: b}},
 template: {metadata: {labels: {a: b}}, spec: `+forever+"}}}")
	defaulted[*appsv1.DaemonSet](t, "{metadata: {name: a}, spec: {"+lasting+"}}", `{spec: {revisionHistoryLimit: 10,
 updateStrategy: {type: RollingUpdate, rollingUpdate: {maxUnavailable: 1, maxSurge: 0}}, selector: {matchLabels: {a: b}},
 template: {metadata: {labels: {a: b}}, spec: `+forever+"}}}")
	defaulted[*autoscalingv2.HorizontalPodAutoscaler](t, "{metadata: {name: a}, spec: {maxReplicas: 2, scaleTargetRef: {kind: Deployment, name: d}, behavior: {scaleDown: {selectPolicy: Min}}}}",
		`{spec: {minReplicas: 1, maxReplicas: 2, scaleTargetRef: {kind: Deployment, name: d},
 metrics: [{type: Resource, resource: {name: cpu, target: {type: Utilization, averageUtilization: 80}}}],
 behavior: {scaleUp: {stabilizationWindowSeconds: 0, selectPolicy: Max, policies: [{type: Pods, value: 4, periodSeconds: 15}, {type: Percent, value: 100, periodSeconds: 15}]},
  scaleDown: {selectPolicy: Min, policies: [{type: Percent, value: 100, periodSeconds: 15}]}}}}`)
}
