package kinds

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

// has compares errors with what is expected of them: each want is the start of
// the text of one error, in order. None means valid.
func has(t *testing.T, name string, errs field.ErrorList, want ...string) {
	t.Helper()
	var got []string
	for _, e := range errs {
		got = append(got, e.Error())
	}
	ok := slices.EqualFunc(got, want, strings.HasPrefix)
	if !ok {
		t.Errorf("%s:\n got  %s\n want %s", name, strings.Join(got, "\n      "), strings.Join(want, "\n      "))
	}
}

func judge[P api.Object](t *testing.T, text string) field.ErrorList {
	t.Helper()
	o := load[P](t, text)
	return All().ByType(o).Validate(o)
}

// F38: a pod that is wrong is refused, and the field is named.
func TestPodValidation(t *testing.T) {
	pod := func(spec string) string { return "{metadata: {name: a}, spec: {" + spec + "}}" }
	with := func(container string) string { return pod("containers: [{name: c, image: i, " + container + "}]") }
	for _, c := range []struct {
		name, text string
		want       []string
	}{
		{"good", with("ports: [{containerPort: 80, name: http}]"), nil},
		{"no containers", pod("restartPolicy: Always"), []string{"spec.containers: Required value"}},
		{"no image", pod("containers: [{name: c}]"), []string{"spec.containers[0].image: Required value"}},
		{"no name", pod("containers: [{image: i}]"), []string{"spec.containers[0].name: Required value"}},
		{"bad pod name", "{metadata: {name: A_b}, spec: {containers: [{name: c, image: i}]}}", []string{`metadata.name: Invalid value: "A_b": a lowercase RFC 1123 subdomain`}},
		{"bad label", "{metadata: {name: a, labels: {a b: c}}, spec: {containers: [{name: c, image: i}]}}", []string{"metadata.labels: Invalid value: \"a b\""}},
		{"bad name", pod("containers: [{name: C_1, image: i}]"), []string{`spec.containers[0].name: Invalid value: "C_1": a lowercase RFC 1123 label`}},
		{"same name", pod("initContainers: [{name: c, image: i}], containers: [{name: c, image: i}]"), []string{`spec.initContainers[0].name: Duplicate value: "c"`}},
		{"restart policy", pod("restartPolicy: Sometimes, containers: [{name: c, image: i}]"), []string{`spec.restartPolicy: Unsupported value: "Sometimes": supported values: "Always", "OnFailure", "Never"`}},
		{"pull policy", with("imagePullPolicy: Now"), []string{`spec.containers[0].imagePullPolicy: Unsupported value: "Now"`}},
		{"port range", with("ports: [{containerPort: 70000}]"), []string{"spec.containers[0].ports[0].containerPort: Invalid value: 70000: must be between 1 and 65535, inclusive"}},
		{"no port", with("ports: [{name: a}]"), []string{"spec.containers[0].ports[0].containerPort: Required value"}},
		{"port names", with("ports: [{containerPort: 1, name: a}, {containerPort: 2, name: a}]"), []string{`spec.containers[0].ports[1].name: Duplicate value: "a"`}},
		{"host ports", with("ports: [{containerPort: 1, hostPort: 80}, {containerPort: 2, hostPort: 80}]"), []string{"spec.containers[0].ports[1].hostPort: Duplicate value"}},
		{"same port, other protocol", with("ports: [{containerPort: 1, hostPort: 80}, {containerPort: 1, hostPort: 80, protocol: UDP}]"), nil},
		{"host network", pod("hostNetwork: true, containers: [{name: c, image: i, ports: [{containerPort: 1, hostPort: 2}]}]"), []string{"spec.containers[0].ports[0].hostPort: Invalid value: 2: must match `containerPort` when `hostNetwork` is true"}},
		{"protocol", with("ports: [{containerPort: 1, protocol: tcp}]"), []string{`spec.containers[0].ports[0].protocol: Unsupported value: "tcp"`}},
		{"env name", with("env: [{name: a=b, value: c}]"), []string{`spec.containers[0].env[0].name: Invalid value: "a=b"`}},
		{"env twice over", with("env: [{name: A, value: c, valueFrom: {fieldRef: {fieldPath: status.podIP}}}]"), []string{"spec.containers[0].env[0].valueFrom: Invalid value: \"\": may not be specified when `value` is not empty"}},
		{"env field", with("env: [{name: A, valueFrom: {fieldRef: {fieldPath: spec.oops}}}]"), []string{`spec.containers[0].env[0].valueFrom.fieldRef.fieldPath: Invalid value: "spec.oops": error converting fieldPath: field label not supported: spec.oops`}},
		{"env label", with("env: [{name: A, valueFrom: {fieldRef: {fieldPath: \"metadata.labels['app']\"}}}]"), nil},
		{"env key", with("env: [{name: A, valueFrom: {configMapKeyRef: {name: c}}}]"), []string{"spec.containers[0].env[0].valueFrom.configMapKeyRef.key: Required value"}},
		{"requests over limits", with("resources: {limits: {cpu: 100m}, requests: {cpu: 200m}}"), []string{`spec.containers[0].resources.requests: Invalid value: "200m": must be less than or equal to cpu limit of 100m`}},
		{"negative", with("resources: {limits: {cpu: -1}}"), []string{`spec.containers[0].resources.limits[cpu]: Invalid value: "-1": must be greater than or equal to 0`, `spec.containers[0].resources.requests[cpu]: Invalid value: "-1"`}},
		{"unknown resource", with("resources: {limits: {cpus: 1}}"), []string{
			`spec.containers[0].resources.limits[cpus]: Invalid value: "cpus": must be a standard resource type or fully qualified`,
			`spec.containers[0].resources.limits[cpus]: Invalid value: "cpus": must be a standard resource for containers`,
			"spec.containers[0].resources.requests[cpus]", "spec.containers[0].resources.requests[cpus]"}},
		{"a gpu", with("resources: {limits: {nvidia.com/gpu: 2}}"), nil},
		{"half a gpu", with("resources: {limits: {nvidia.com/gpu: 500m}}"), []string{`spec.containers[0].resources.limits[nvidia.com/gpu]: Invalid value: "500m": must be an integer`, "spec.containers[0].resources.requests[nvidia.com/gpu]"}},
		{"gpus requested", with("resources: {requests: {nvidia.com/gpu: 1}}"), []string{"spec.containers[0].resources.limits: Required value: Limit must be set for non overcommitable resources"}},
		{"no such volume", with("volumeMounts: [{name: v, mountPath: /v}]"), []string{`spec.containers[0].volumeMounts[0].name: Not found: "v"`}},
		{"same mount path", pod("volumes: [{name: v}], containers: [{name: c, image: i, volumeMounts: [{name: v, mountPath: /v}, {name: v, mountPath: /v}]}]"), []string{`spec.containers[0].volumeMounts[1].mountPath: Invalid value: "/v": must be unique`}},
		{"sub path", pod("volumes: [{name: v}], containers: [{name: c, image: i, volumeMounts: [{name: v, mountPath: /v, subPath: a/../../b}]}]"), []string{`spec.containers[0].volumeMounts.subPath: Invalid value: "a/../../b": must not contain '..'`}},
		{"two sources", pod("volumes: [{name: v, emptyDir: {}, hostPath: {path: /a}}], containers: [{name: c, image: i}]"), []string{"spec.volumes[0].hostPath: Forbidden: may not specify more than 1 volume type"}},
		{"same volume", pod("volumes: [{name: v}, {name: v}], containers: [{name: c, image: i}]"), []string{`spec.volumes[1].name: Duplicate value: "v"`}},
		{"volume of nothing", pod("volumes: [{name: v, configMap: {}}], containers: [{name: c, image: i}]"), []string{"spec.volumes[0].configMap.name: Required value"}},
		{"file mode", pod("volumes: [{name: v, secret: {secretName: s, defaultMode: 512}}], containers: [{name: c, image: i}]"), []string{"spec.volumes[0].secret.defaultMode: Invalid value: 512: must be a number between 0 and 0777"}},
		{"short token", pod("serviceAccountName: s, volumes: [{name: v, projected: {sources: [{serviceAccountToken: {path: t, expirationSeconds: 60}}]}}], containers: [{name: c, image: i}]"), []string{"spec.volumes[0].projected.sources[0].serviceAccountToken.expirationSeconds: Invalid value: 60: may not specify a duration less than 10 minutes"}},
		{"probe of nothing", with("livenessProbe: {}"), []string{"spec.containers[0].livenessProbe: Required value: must specify a handler type"}},
		{"probe of two", with("livenessProbe: {exec: {command: [a]}, tcpSocket: {port: 1}}"), []string{"spec.containers[0].livenessProbe.tcpSocket: Forbidden: may not specify more than 1 handler type"}},
		{"probe port", with("readinessProbe: {httpGet: {port: 0}}"), []string{"spec.containers[0].readinessProbe.httpGet.port: Invalid value: 0: must be between 1 and 65535, inclusive"}},
		{"probe threshold", with("livenessProbe: {successThreshold: 2, tcpSocket: {port: 1}}"), []string{"spec.containers[0].livenessProbe.successThreshold: Invalid value: 2: must be 1"}},
		{"readiness threshold", with("readinessProbe: {successThreshold: 2, tcpSocket: {port: 1}}"), nil},
		{"probe time", with("startupProbe: {periodSeconds: -1, tcpSocket: {port: 1}}"), []string{"spec.containers[0].startupProbe.periodSeconds: Invalid value: -1"}},
		{"hook of nothing", with("lifecycle: {preStop: {}}"), []string{"spec.containers[0].lifecycle.preStop: Required value: must specify a handler type"}},
		{"init probe", pod("initContainers: [{name: i, image: i, readinessProbe: {tcpSocket: {port: 1}}}], containers: [{name: c, image: i}]"), []string{"spec.initContainers[0].readinessProbe: Forbidden: may not be set for init containers without restartPolicy=Always"}},
		{"sidecar probe", pod("initContainers: [{name: i, image: i, restartPolicy: Always, readinessProbe: {tcpSocket: {port: 1}}}], containers: [{name: c, image: i}]"), nil},
		{"toleration", pod("tolerations: [{operator: Equal, value: a}], containers: [{name: c, image: i}]"), []string{`spec.tolerations[0].operator: Invalid value: "Equal": operator must be Exists when`}},
		{"toleration seconds", pod("tolerations: [{key: a, operator: Exists, effect: NoSchedule, tolerationSeconds: 3}], containers: [{name: c, image: i}]"), []string{`spec.tolerations[0].effect: Invalid value: "NoSchedule": effect must be 'NoExecute'`}},
		{"affinity operator", pod("affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: a, operator: Like}]}]}}}, containers: [{name: c, image: i}]"), []string{"spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0].operator: Invalid value: \"Like\": not a valid selector operator"}},
		{"affinity values", pod("affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: a, operator: In}]}]}}}, containers: [{name: c, image: i}]"), []string{"spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchExpressions[0].values: Required value: must be specified when `operator` is 'In' or 'NotIn'"}},
		{"affinity weight", pod("affinity: {podAntiAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [{weight: 101, podAffinityTerm: {topologyKey: a}}]}}, containers: [{name: c, image: i}]"), []string{"spec.affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight: Invalid value: 101: must be in the range 1-100"}},
		{"topology key", pod("affinity: {podAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{labelSelector: {}}]}}, containers: [{name: c, image: i}]"), []string{
			"spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey: Required value",
			`spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey: Invalid value: "": name part must be non-empty`,
			`spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey: Invalid value: "": name part must consist of`}},
		{"label keys without selector", pod("affinity: {podAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{topologyKey: a, matchLabelKeys: [x]}]}}, containers: [{name: c, image: i}]"),
			[]string{"spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].matchLabelKeys: Forbidden: must not be specified when labelSelector is not set"}},
		{"label keys both ways", pod("affinity: {podAntiAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{topologyKey: a, labelSelector: {}, matchLabelKeys: [x], mismatchLabelKeys: [x]}]}}, containers: [{name: c, image: i}]"),
			[]string{`spec.affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].matchLabelKeys[0]: Invalid value: "x": exists in both matchLabelKeys and mismatchLabelKeys`}},
		{"label key selected twice", pod("topologySpreadConstraints: [{maxSkew: 1, topologyKey: a, whenUnsatisfiable: DoNotSchedule, matchLabelKeys: [x], labelSelector: {matchLabels: {x: a}, matchExpressions: [{key: x, operator: Exists}]}}], containers: [{name: c, image: i}]"),
			[]string{`spec.topologySpreadConstraints[0][0]: Invalid value: "x": exists in both matchLabelKeys and labelSelector`}},
		{"spread", pod("topologySpreadConstraints: [{maxSkew: 0, topologyKey: a, whenUnsatisfiable: Sometimes, nodeTaintsPolicy: Perhaps, labelSelector: {}}], containers: [{name: c, image: i}]"),
			[]string{"spec.topologySpreadConstraints[0].maxSkew: Invalid value: 0: must be greater than zero", `spec.topologySpreadConstraints[0].whenUnsatisfiable: Unsupported value: "Sometimes": supported values: "DoNotSchedule", "ScheduleAnyway"`,
				`spec.topologySpreadConstraints[0].nodeTaintsPolicy: Unsupported value: "Perhaps": supported values: "Honor", "Ignore"`}},
		{"spread twice", pod("topologySpreadConstraints: [{maxSkew: 1, topologyKey: a, whenUnsatisfiable: ScheduleAnyway, minDomains: 2}, {maxSkew: 2, topologyKey: a, whenUnsatisfiable: ScheduleAnyway}], containers: [{name: c, image: i}]"),
			[]string{"spec.topologySpreadConstraints[0].minDomains: Invalid value: 2: can only use minDomains if whenUnsatisfiable=DoNotSchedule, not ScheduleAnyway", `spec.topologySpreadConstraints[0].{topologyKey, whenUnsatisfiable}: Duplicate value: "{a, ScheduleAnyway}"`}},
		{"node selector", pod("nodeSelector: {a b: c}, containers: [{name: c, image: i}]"), []string{"spec.nodeSelector: Invalid value: \"a b\""}},
		{"grace", pod("terminationGracePeriodSeconds: -1, containers: [{name: c, image: i}]"), nil},
		{"dns", pod("dnsPolicy: None, containers: [{name: c, image: i}]"), []string{"spec.dnsConfig: Required value: must provide `dnsConfig` when `dnsPolicy` is None"}},
		{"seccomp", with("securityContext: {seccompProfile: {type: Localhost}}"), []string{"spec.containers[0].securityContext.seccompProfile.localhostProfile: Required value"}},
	} {
		t.Run(c.name, func(t *testing.T) { has(t, c.name, judge[*corev1.Pod](t, c.text), c.want...) })
	}
}

func TestServiceValidation(t *testing.T) {
	svc := func(spec string) string { return "{metadata: {name: a}, spec: {" + spec + "}}" }
	for _, c := range []struct {
		name, text string
		want       []string
	}{
		{"good", svc("ports: [{port: 80}]"), nil},
		{"name of a digit", "{metadata: {name: 1a}, spec: {ports: [{port: 80}]}}", nil},
		{"name with a dot", "{metadata: {name: a.b}, spec: {ports: [{port: 80}]}}", []string{`metadata.name: Invalid value: "a.b": must not contain dots`}},
		{"no ports", svc("selector: {a: b}"), []string{"spec.ports: Required value"}},
		{"headless needs none", svc("clusterIP: None"), nil},
		{"type", svc("type: Global, ports: [{port: 80}]"), []string{`spec.type: Unsupported value: "Global"`}},
		{"port names", svc("ports: [{port: 80}, {port: 81, name: b}]"), []string{"spec.ports[0].name: Required value"}},
		{"same port", svc("ports: [{port: 80, name: a}, {port: 80, name: b}]"), []string{`spec.ports[1]: Duplicate value: {"Name":"","Protocol":"TCP","AppProtocol":null,"Port":80,"TargetPort":0,"NodePort":0}`}},
		{"port", svc("ports: [{port: 0}]"), []string{"spec.ports[0].port: Invalid value: 0", "spec.ports[0].targetPort: Invalid value: 0"}},
		{"node port of ClusterIP", svc("ports: [{port: 80, nodePort: 30080}]"), []string{"spec.ports[0].nodePort: Forbidden: may not be used when `type` is 'ClusterIP'"}},
		{"any node port", svc("type: NodePort, ports: [{port: 80, nodePort: 80}]"), nil}, // the allocator has the range
		{"same node port", svc("type: NodePort, ports: [{port: 80, nodePort: 30080, name: a}, {port: 81, nodePort: 30080, name: b}]"), []string{"spec.ports[1].nodePort: Duplicate value: 30080"}},
		{"address", svc("clusterIP: 10.96.0, ports: [{port: 80}]"), []string{`spec.clusterIPs[0]: Invalid value: "10.96.0"`}},
		{"external name", svc("type: ExternalName"), []string{"spec.externalName: Required value"}},
		{"headless node port", svc("type: NodePort, clusterIP: None, ports: [{port: 80}]"), []string{`spec.clusterIPs[0]: Invalid value: "None": may not be set to 'None' for NodePort services`}},
	} {
		t.Run(c.name, func(t *testing.T) { has(t, c.name, judge[*corev1.Service](t, c.text), c.want...) })
	}
}

func TestWorkloadValidation(t *testing.T) {
	deploy := func(spec, labels string) string {
		return "{metadata: {name: a}, spec: {" + spec + " template: {metadata: {labels: {" + labels + "}}, spec: {containers: [{name: c, image: i}]}}}}"
	}
	has(t, "good", judge[*appsv1.Deployment](t, deploy("selector: {matchLabels: {a: b}},", "a: b")))
	has(t, "labels", judge[*appsv1.Deployment](t, deploy("selector: {matchLabels: {a: b}},", "a: c")),
		"spec.template.metadata.labels: Invalid value: {\"a\":\"c\"}: `selector` does not match template `labels`")
	has(t, "no selector", judge[*appsv1.Deployment](t, deploy("", "a: b")), "spec.selector: Required value",
		"spec.template.metadata.labels: Invalid value: {\"a\":\"b\"}: `selector` does not match template `labels`")
	has(t, "empty selector", judge[*appsv1.Deployment](t, deploy("selector: {},", "a: b")), "spec.selector: Invalid value: {}: empty selector is invalid")
	has(t, "no progress", judge[*appsv1.Deployment](t, deploy("selector: {matchLabels: {a: b}}, strategy: {rollingUpdate: {maxSurge: 0, maxUnavailable: 0%}},", "a: b")),
		`spec.strategy.rollingUpdate.maxUnavailable: Invalid value: "0%": may not be 0 when `+"`maxSurge` is 0")
	has(t, "replicas", judge[*appsv1.ReplicaSet](t, deploy("replicas: -1, selector: {matchLabels: {a: b}},", "a: b")), "spec.replicas: Invalid value: -1")
	has(t, "template", judge[*appsv1.Deployment](t, strings.Replace(deploy("selector: {matchLabels: {a: b}},", "a: b"), "image: i", "imagePullPolicy: Always", 1)),
		"spec.template.spec.containers[0].image: Required value")
}

func TestOtherValidation(t *testing.T) {
	has(t, "key", judge[*corev1.ConfigMap](t, "{metadata: {name: a}, data: {a/b: c}}"), `data[a/b]: Invalid value: "a/b": a valid config key must consist of`)
	big := load[*corev1.ConfigMap](t, "{metadata: {name: a}}")
	big.Data = map[string]string{"a": strings.Repeat("x", 1<<20+1)}
	has(t, "1 MiB", All().ByType(big).Validate(big), "[]: Too long: may not be more than 1048576")
	has(t, "tls", judge[*corev1.Secret](t, "{metadata: {name: a}, type: kubernetes.io/tls}"), "data[tls.crt]: Required value", "data[tls.key]: Required value")
	has(t, "rule", judge[*rbacv1.Role](t, "{metadata: {name: 'system:a'}, rules: [{verbs: [get]}]}"),
		"rules[0].apiGroups: Required value", "rules[0].resources: Required value")
	has(t, "subject", judge[*rbacv1.ClusterRoleBinding](t, "{metadata: {name: a}, roleRef: {kind: Role, name: r}, subjects: [{kind: ServiceAccount, name: s}]}"),
		`roleRef.kind: Unsupported value: "Role": supported values: "ClusterRole"`, "subjects[0].namespace: Required value")
	has(t, "claim", judge[*corev1.PersistentVolumeClaim](t, "{metadata: {name: a}, spec: {}}"),
		"spec.accessModes: Required value", "spec.resources[storage]: Required value")
	has(t, "mode", judge[*corev1.PersistentVolumeClaim](t, "{metadata: {name: a}, spec: {accessModes: [RWO], resources: {requests: {storage: 1Gi}}}}"),
		`spec.accessModes: Unsupported value: "RWO"`)
	has(t, "volume", judge[*corev1.PersistentVolume](t, "{metadata: {name: a}, spec: {accessModes: [ReadWriteOnce], capacity: {storage: 1Gi}}}"),
		"spec: Required value: must specify a volume type")
	has(t, "local", judge[*corev1.PersistentVolume](t, "{metadata: {name: a}, spec: {accessModes: [ReadWriteOnce], capacity: {storage: 1Gi}, local: {path: /a}}}"),
		"spec.nodeAffinity: Required value: Local volume requires node affinity")
	has(t, "options of NFS", judge[*corev1.PersistentVolume](t, "{metadata: {name: a}, spec: {accessModes: [ReadWriteMany], capacity: {storage: 1Gi}, nfs: {server: files, path: /a}, mountOptions: [nfsvers=4.1]}}"))
	has(t, "NFS", judge[*corev1.PersistentVolume](t, "{metadata: {name: a}, spec: {accessModes: [ReadWriteMany], capacity: {storage: 1Gi}, nfs: {path: a}}}"),
		"spec.nfs.server: Required value", `spec.nfs.path: Invalid value: "a": must be an absolute path`)
	has(t, "NFS without a path", judge[*corev1.Pod](t, "{metadata: {name: a}, spec: {containers: [{name: a, image: a}], volumes: [{name: v, nfs: {server: files}}]}}"),
		"spec.volumes[0].nfs.path: Required value", `spec.volumes[0].nfs.path: Invalid value: "": must be an absolute path`)
	has(t, "taints", judge[*corev1.Node](t, "{metadata: {name: a}, spec: {taints: [{key: a, effect: NoRun}, {key: b, effect: NoExecute}, {key: b, effect: NoExecute}]}}"),
		`metadata.taints[0].effect: Unsupported value: "NoRun"`, "metadata.taints[2]: Duplicate value")
	has(t, "class", judge[*storagev1.StorageClass](t, "{metadata: {name: a}}"), "provisioner: Required value")
	has(t, "namespace name", judge[*corev1.Namespace](t, "{metadata: {name: a.b}}"), `metadata.name: Invalid value: "a.b"`)
	has(t, "event", judge[*corev1.Event](t, "{metadata: {name: a}, involvedObject: {namespace: other}}"), "involvedObject.namespace: Invalid value")
}

func TestScale(t *testing.T) {
	d := load[*appsv1.Deployment](t, "{metadata: {name: a, generation: 4, resourceVersion: '7'}, spec: {selector: {matchLabels: {a: b}}, replicas: 2}}")
	sub := All().ByType(d).Subresources["scale"]
	view := sub.View(d).(*autoscalingv1.Scale)
	if view.Spec.Replicas != 2 || view.Status.Selector != "a=b" || view.Kind != "Scale" || view.ResourceVersion != "7" {
		t.Errorf("view %+v", view)
	}
	view.Spec.Replicas = 5
	if err := sub.Merge(d, view); err != nil || *d.Spec.Replicas != 5 || d.Generation != 5 {
		t.Errorf("%v, replicas %d, generation %d", err, *d.Spec.Replicas, d.Generation)
	}
	view.Spec.Replicas = -1
	if err := sub.Merge(d, view); !apierrors.IsInvalid(err) {
		t.Errorf("negative: %v", err)
	}
	view.Spec.Replicas, view.ResourceVersion = 3, "6"
	if err := sub.Merge(d, view); !apierrors.IsConflict(err) {
		t.Errorf("stale: %v", err)
	}
	if err := sub.Merge(d, d); !apierrors.IsBadRequest(err) {
		t.Errorf("not a Scale: %v", err)
	}
}
