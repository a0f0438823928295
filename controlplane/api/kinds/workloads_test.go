package kinds_test

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

func TestSmallKindsValidation(t *testing.T) {
	limit := func(s string) string { return "spec: {limits: [{type: Container, " + s + "}]}" }
	const l0 = "spec.limits[0]."
	kindstest.CheckRejected[*corev1.LimitRange](t,
		"{metadata: {name: a}, spec: {limits: [{type: Container, max: {cpu: 1}}]}}", []kindstest.InvalidPatch{
			{Patch: "spec: {limits: [{type: Thing}]}",
				Want: l0 + `type: Invalid value: "Thing": must be a standard limit type or fully qualified`},
			{Patch: "spec: {limits: [{type: Pod}, {type: Pod}]}", Want: `spec.limits[1].type: Duplicate value: "Pod"`},
			{Patch: "spec: {limits: [{type: Pod, default: {cpu: 1}}]}",
				Want: l0 + "default: Forbidden: may not be specified when `type` is 'Pod'"},
			{Patch: "spec: {limits: [{type: Pod, defaultRequest: {cpu: 1}}]}",
				Want: l0 + "defaultRequest: Forbidden: may not be specified when `type` is 'Pod'"},
			{Patch: "spec: {limits: [{type: PersistentVolumeClaim}]}",
				Want: l0 + "limits: Required value: either minimum or maximum storage value is required, but " +
					"neither was provided"},
			{Patch: "spec: {limits: [{type: Pod, min: {cpu: 2}, max: {cpu: 1}}]}",
				Want: l0 + `min[cpu]: Invalid value: "2": min value 2 is greater than max value 1`},
			{Patch: limit("max: {disk: 1}"), Want: l0 + `max[disk]: Invalid value: "disk"; ` + l0 +
				`max[disk]: Invalid value: "disk": must be a standard resource for containers; ` +
				l0 + `default[disk]: Invalid value; ` + l0 + `default[disk]: Invalid value; ` +
				l0 + `defaultRequest[disk]: Invalid value; ` + l0 + `defaultRequest[disk]: Invalid value`},
			{Patch: limit("default: {cpu: 1}, defaultRequest: {cpu: 2}"),
				Want: l0 + `defaultRequest[cpu]: Invalid value: "2": default request value 2 is greater than ` +
					`default limit value 1`},
			{Patch: limit("maxLimitRequestRatio: {cpu: 500m}"),
				Want: l0 + `maxLimitRequestRatio[cpu]: Invalid value: "500m": ratio 500m is less than 1`},
			{Patch: "spec: {limits: [{type: Pod, min: {cpu: 1}, max: {cpu: 2}, maxLimitRequestRatio: {cpu: 3}}]}",
				Want: l0 + `maxLimitRequestRatio[cpu]: Invalid value: "3": ratio 3 is greater than max/min = 2.000000`},
		})
	quota := func(s string) string { return "spec: {hard: {" + s + "}}" }
	selected := func(s string) string { return "spec: {scopeSelector: {matchExpressions: [{" + s + "}]}}" }
	const expressions = "spec.scopeSelector.matchExpressions"
	kindstest.CheckRejected[*corev1.ResourceQuota](t, "{metadata: {name: a}, spec: {hard: {pods: 1}}}",
		[]kindstest.InvalidPatch{
			{Patch: quota("pods: -1"),
				Want: `spec.hard[pods]: Invalid value: "-1": must be greater than or equal to 0`},
			{Patch: quota("pods: 500m"), Want: `spec.hard[pods]: Invalid value: "500m": must be an integer`},
			{Patch: quota("things: 1"),
				Want: `spec.hard[things]: Invalid value: "things": must be a standard resource ` +
					`type or fully qualified; spec.hard[things]: Invalid value: "things": must be a standard ` +
					`resource for quota`},
			{Patch: quota("a b: 1"),
				Want: `spec.hard[a b]: Invalid value: "a b": name part must consist of; spec.hard[a ` +
					`b]: Invalid value: "a b": must be a standard resource for quota`},
			{Patch: "spec: {scopes: [Sometimes]}",
				Want: `spec.scopes: Invalid value: ["Sometimes"]: unsupported scope`},
			{Patch: "spec: {scopes: [BestEffort, NotBestEffort]}",
				Want: `spec.scopes: Invalid value: ["BestEffort","NotBestEffort"]: conflicting scopes`},
			{Patch: "spec: {scopes: [BestEffort], hard: {limits.cpu: 1}}",
				Want: `spec.scopes: Invalid value: ["BestEffort"]: unsupported scope applied to resource`},
			{Patch: selected("scopeName: PriorityClass, operator: In"),
				Want: expressions + ".values: Required value: must be at least one value when `operator` is 'In' or " +
					"'NotIn' for scope selector"},
			{Patch: selected("scopeName: PriorityClass, operator: Exists, values: [a]"),
				Want: expressions + `.values: Invalid value: ["a"]: must be no value`},
			{Patch: selected("scopeName: BestEffort, operator: In, values: [a]"),
				Want: expressions + `.operator: Invalid value: "In": must be 'Exists' when scope is any of`},
			{Patch: selected("scopeName: PriorityClass, operator: Near"),
				Want: expressions + `.operator: Invalid value: "Near": not a valid selector operator`},
		})
	kindstest.CheckRejected[*corev1.ReplicationController](t,
		"{metadata: {name: a}, spec: {selector: {a: b}, template: {metadata: {labels: {a: b}}, spec: {containers: "+
			"[{name: c, image: i}]}}}}", []kindstest.InvalidPatch{
			{Patch: "metadata: {name: A}", Want: `metadata.name: Invalid value: "A"`},
			{Patch: "spec: {replicas: -1}", Want: "spec.replicas: Invalid value: -1"},
			{Patch: "spec: {minReadySeconds: -1}", Want: "spec.minReadySeconds: Invalid value: -1"},
			{Patch: "spec: {selector: {a: c}}", Want: "spec.template.metadata.labels: Invalid value: {\"a\":\"b\"}: " +
				"`selector` does not match template `labels`"},
			{Patch: "spec: {template: null}", Want: "spec.template: Required value"},
			{Patch: "spec: {template: null, selector: null}",
				Want: "spec.selector: Required value; spec.template: Required value"},
			{Patch: "spec: {template: {spec: {restartPolicy: Never}}}",
				Want: `spec.template.spec.restartPolicy: Unsupported value: "Never": supported values: "Always"`},
			{Patch: "spec: {template: {spec: {activeDeadlineSeconds: 1}}}",
				Want: "spec.template.spec.activeDeadlineSeconds: Forbidden"},
			{Patch: "spec: {template: {spec: {containers: null}}}",
				Want: "spec.template.spec.containers: Required value"},
		})
	kindstest.CheckRejected[*appsv1.ControllerRevision](t, "{metadata: {name: a}, data: {a: b}, revision: 1}",
		[]kindstest.InvalidPatch{
			{Patch: "data: null", Want: "data: Required value: data is mandatory"},
			{Patch: "revision: -1", Want: "revision: Invalid value: -1: must be greater than or equal to 0"},
		})
}

// What pods were made by stays; what they can follow may change.
func TestWorkloadUpdates(t *testing.T) {
	set := kindstest.Load[*appsv1.StatefulSet](t,
		"{metadata: {name: a, generation: 1}, spec: {"+kindstest.LastingTemplate+"}}")
	changes := map[string]func(*appsv1.StatefulSet){
		"": func(s *appsv1.StatefulSet) {
			s.Spec.Replicas = new(int32(5))
			s.Spec.Template.Spec.Containers[0].Image = "j"
		},
		"spec": func(s *appsv1.StatefulSet) { s.Spec.ServiceName = "other" },
	}
	for want, change := range changes {
		got, wrong := kindstest.RunUpdate(t, set, "", change)
		if strings.Join(wrong, ",") != want || got.Generation != 2 {
			t.Errorf("StatefulSet: %q, want %q, generation %d", wrong, want, got.Generation)
		}
	}
	daemon := kindstest.Load[*appsv1.DaemonSet](t,
		"{metadata: {name: a, generation: 1}, spec: {"+kindstest.LastingTemplate+"}}")
	kinds.All().ByType(daemon).Writes.PrepareCreate(daemon)
	got, wrong := kindstest.RunUpdate(t, daemon, "", func(d *appsv1.DaemonSet) {
		d.Spec.Template.Spec.Containers[0].Image = "j"
	})
	if wrong != nil || got.Annotations[appsv1.DeprecatedTemplateGeneration] != "2" ||
		daemon.Annotations[appsv1.DeprecatedTemplateGeneration] != "1" {
		t.Errorf("DaemonSet: %q, %v", wrong, got.Annotations)
	}
	if _, wrong = kindstest.RunUpdate(t, daemon, "", func(d *appsv1.DaemonSet) {
		d.Spec.Selector = &metav1.LabelSelector{}
	}); !slices.Equal(wrong, []string{"spec.selector"}) {
		t.Errorf("DaemonSet: %q", wrong)
	}
}

// What is left out is filled as Kubernetes documents it.
func TestWorkloadDefaults(t *testing.T) {
	const pod = `{restartPolicy: Never, dnsPolicy: ClusterFirst, schedulerName: default-scheduler, securityContext: {}, terminationGracePeriodSeconds: 30,
 containers: [{name: c, image: i, imagePullPolicy: Always, resources: {}, terminationMessagePath: /dev/termination-log, terminationMessagePolicy: File}]}`
	forever := strings.Replace(pod, "Never", "Always", 1)
	kindstest.CheckDefaults[*batchv1.Job](t, "{metadata: {name: a}, spec: {"+kindstest.EndingTemplate+"}}",
		`{spec: {parallelism: 1, completions: 1, backoffLimit: 6, completionMode: NonIndexed,
 suspend: false, manualSelector: false, podReplacementPolicy: TerminatingOrFailed, template: {metadata: {}, spec: `+pod+
			"}}}")
	kindstest.CheckDefaults[*batchv1.CronJob](t,
		"{metadata: {name: a}, spec: {schedule: '@daily', jobTemplate: {spec: {"+kindstest.EndingTemplate+"}}}}",
		`{spec: {schedule: '@daily', concurrencyPolicy: Allow, suspend: false, successfulJobsHistoryLimit: 3, failedJobsHistoryLimit: 1,
 jobTemplate: {metadata: {}, spec: {template: {metadata: {}, spec: `+pod+"}}}}}")
	kindstest.CheckDefaults[*appsv1.StatefulSet](t, "{metadata: {name: a}, spec: {"+kindstest.LastingTemplate+"}}",
		`{spec: {replicas: 1, revisionHistoryLimit: 10, serviceName: '',
 podManagementPolicy: OrderedReady, updateStrategy: {type: RollingUpdate, rollingUpdate: {partition: 0, maxUnavailable: 1}},
 persistentVolumeClaimRetentionPolicy: {whenDeleted: Retain, whenScaled: Retain}, selector: {matchLabels: {a: b}},
 template: {metadata: {labels: {a: b}}, spec: `+forever+"}}}")
	kindstest.CheckDefaults[*appsv1.DaemonSet](t, "{metadata: {name: a}, spec: {"+kindstest.LastingTemplate+"}}",
		`{spec: {revisionHistoryLimit: 10,
 updateStrategy: {type: RollingUpdate, rollingUpdate: {maxUnavailable: 1, maxSurge: 0}}, selector: {matchLabels: {a: b}},
 template: {metadata: {labels: {a: b}}, spec: `+forever+"}}}")
	kindstest.CheckDefaults[*autoscalingv2.HorizontalPodAutoscaler](t,
		"{metadata: {name: a}, spec: {maxReplicas: 2, scaleTargetRef: {kind: Deployment, name: d}, behavior: "+
			"{scaleDown: {selectPolicy: Min}}}}",
		`{spec: {minReplicas: 1, maxReplicas: 2, scaleTargetRef: {kind: Deployment, name: d},
 metrics: [{type: Resource, resource: {name: cpu, target: {type: Utilization, averageUtilization: 80}}}],
 behavior: {scaleUp: {stabilizationWindowSeconds: 0, selectPolicy: Max, policies: [{type: Pods, value: 4, periodSeconds: 15}, {type: Percent, value: 100, periodSeconds: 15}]},
  scaleDown: {selectPolicy: Min, policies: [{type: Percent, value: 100, periodSeconds: 15}]}}}}`)
}
