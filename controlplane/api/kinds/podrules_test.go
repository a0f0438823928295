package kinds

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
)

// Each rule of a new pod, with the field and the text of Kubernetes. F38
func TestPodRulesOfKubernetes(t *testing.T) {
	const c0, v0 = "spec.containers[0].", "spec.volumes[0]."
	env := func(from string) string {
		return "{metadata: {name: a}, spec: {volumes: [{name: e, emptyDir: {}}, {name: s, secret: {secretName: s}}], " +
			"containers: [{name: c, image: i, env: [{name: E, valueFrom: {" + from + "}}]}]}}"
	}
	volume := func(source string) string { return podWith("volumes: [{name: v, " + source + "}]") }
	devices := func(list string) string {
		return "{metadata: {name: a}, spec: {volumes: [{name: b, persistentVolumeClaim: {claimName: b}}, {name: p, persistentVolumeClaim: {claimName: p}}], " +
			"containers: [{name: c, image: i, " + list + "}]}}"
	}
	annotated := func(key, value string) string {
		return "{metadata: {name: a, annotations: {" + key + ": '" + value + "'}}, spec: {containers: [{name: c, image: i}]}}"
	}
	const file = c0 + "env[0].valueFrom.fileKeyRef."
	refuses[*corev1.Pod](t,
		bad{podContainer("securityContext: {procMount: Unmasked}"), invalidText(c0+"securityContext.procMount", "Unmasked", "`hostUsers` must be false to use `Unmasked`")},
		bad{podWith("os: {name: plan9}"), `spec.os: Unsupported value: "plan9": supported values: "linux", "windows"`},
		bad{podWith("os: {}"), "spec.os.name: Required value"},
		bad{podWith("hostPID: true, shareProcessNamespace: true"), "spec.shareProcessNamespace: Invalid value: true: ShareProcessNamespace and HostPID cannot both be enabled"},
		bad{podWith("hostUsers: false, hostPID: true"), "spec.HostPID: Forbidden: when `hostUsers` is false"},
		bad{env("fileKeyRef: {volumeName: e, path: f, key: K}"), ""},
		bad{env("fileKeyRef: {volumeName: s, path: f, key: K}"), invalidText(file+"volumeName", "s", "referenced volume must be of type emptyDir")},
		bad{env("fileKeyRef: {volumeName: none, path: ../f, key: a=b}"), invalidText(file+"key", "a=b", "a valid environment variable name must consist only of printable ASCII "+
			"characters other than '='") + "\n" + invalidText(file+"path", "../f", "must not contain '..'") + "\n" + file + `volumeName: Not found: "none"`},
		bad{env(""), invalidText(c0+"env[0].valueFrom", "", "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`")},
		bad{env("fieldRef: {fieldPath: spec.host}"), ""},
		bad{env("resourceFieldRef: {resource: limits.memory, divisor: 1024}"), invalidText(c0+"env[0].valueFrom.resourceFieldRef.divisor", "limits.memory",
			"only divisor's values 1, 1k, 1M, 1G, 1T, 1P, 1E, 1Ki, 1Mi, 1Gi, 1Ti, 1Pi, 1Ei are supported with the memory resource")},
		bad{podContainer("envFrom: [{secretRef: {name: a-}}]"), ""},
		bad{volume("emptyDir: {}, hostPath: {path: ''}, nfs: {}"), v0 + "hostPath: Forbidden: may not specify more than 1 volume type\n" +
			v0 + "nfs: Forbidden: may not specify more than 1 volume type"},
		bad{volume("csi: {driver: x.io, nodePublishSecretRef: {name: ''}}"), v0 + "csi.nodePublishSecretRef.name: Required value"},
		bad{volume("downwardAPI: {items: [{path: p}]}"), v0 + "downwardAPI: Required value: one of fieldRef and resourceFieldRef is required"},
		bad{volume("projected: {sources: [{}]}"), ""},
		bad{volume("projected: {sources: [{secret: {name: a}, configMap: {name: b}}]}"), v0 + "projected.sources[0]: Forbidden: may not specify more than 1 volume type per source"},
		bad{volume("projected: {sources: [{serviceAccountToken: {path: t}}]}"),
			v0 + "projected.sources[0].serviceAccountToken: Forbidden: must not be specified when serviceAccountName is not set"},
		bad{devices("volumeDevices: [{name: b, devicePath: /a}, {name: b, devicePath: /a}]"),
			invalidText(c0+"volumeDevices[1].name", "b", "must be unique") + "\n" + invalidText(c0+"volumeDevices[1].devicePath", "/a", "must be unique")},
		bad{devices("volumeMounts: [{name: b, mountPath: /a}], volumeDevices: [{name: b, devicePath: /a}]"),
			invalidText(c0+"volumeMounts[0].name", "b", "must not already exist in volumeDevices") + "\n" +
				invalidText(c0+"volumeMounts[0].mountPath", "/a", "must not already exist as a path in volumeDevices") + "\n" +
				invalidText(c0+"volumeDevices[0].name", "b", "must not already exist in volumeMounts") + "\n" +
				invalidText(c0+"volumeDevices[0].devicePath", "/a", "must not already exist as a path in volumeMounts")},
		bad{podContainer("livenessProbe: {exec: {command: [a]}, grpc: {port: 0}}"), c0 + "livenessProbe.grpc: Forbidden: may not specify more than 1 handler type"},
		bad{podWith("initContainers: [{name: i, image: i, ports: [{containerPort: 1, hostPort: 1}, {containerPort: 1, hostPort: 1}]}]"),
			`spec.initContainers[0].ports[1].hostPort: Duplicate value: "TCP//1"`},
		bad{podWith("resourceClaims: [{name: a, resourceClaimName: x}, {name: a, resourceClaimName: y}]"), `spec.resourceClaims[1].name: Duplicate value: "a"`},
		bad{podWith("dnsConfig: {nameservers: [1.1.1.1, 1.1.1.2, 1.1.1.3, 1.1.1.4]}"),
			`spec.dnsConfig.nameservers: Invalid value: ["1.1.1.1","1.1.1.2","1.1.1.3","1.1.1.4"]: must not have more than 3 nameservers`},
		bad{annotated("controller.kubernetes.io/pod-deletion-cost", "+1"),
			invalidText("metadata.annotations[controller.kubernetes.io/pod-deletion-cost]", "+1", "must be a 32bit integer")},
		bad{annotated("controller.kubernetes.io/pod-deletion-cost", "-5"), ""},
		bad{annotated("seccomp.security.alpha.kubernetes.io/pod", "x"), invalidText("metadata.annotations.seccomp.security.alpha.kubernetes.io/pod", "x", "must be a valid seccomp profile")},
		bad{annotated("scheduler.alpha.kubernetes.io/tolerations", `[{"operator":"Exists","effect":"X"}]`),
			`metadata.annotations.scheduler.alpha.kubernetes.io/tolerations[0].effect: Unsupported value: "X": supported values: "NoSchedule", "PreferNoSchedule", "NoExecute"`},
		bad{"{metadata: {name: a, annotations: {seccomp.security.alpha.kubernetes.io/pod: unconfined}}, spec: {securityContext: {seccompProfile: {type: RuntimeDefault}}, containers: [{name: c, image: i}]}}",
			"spec.securityContext.seccompProfile.type: Forbidden: seccomp type in annotation and field must match"},
	)
	refuses[*corev1.PodTemplate](t, bad{"{metadata: {name: a}, template: {spec: {containers: [{name: c, image: ' i'}]}}}", ""})
}

// An update of a pod changes images, the deadline, tolerations and gates; the fault of any other change names the fields. F38
func TestPodUpdateRules(t *testing.T) {
	const rule = "spec: Forbidden: " + podspec.PodUpdateRule + "\nchanged: spec."
	set := func(f func(*corev1.PodSpec)) func(*corev1.Pod) { return func(p *corev1.Pod) { f(&p.Spec) } }
	changes(t, "{metadata: {name: a, annotations: {controller.kubernetes.io/pod-deletion-cost: x}}, spec: {activeDeadlineSeconds: 10, nodeSelector: {a: b}, "+
		"schedulingGates: [{name: g}], tolerations: [{key: t, operator: Exists}], containers: [{name: c, image: i}], initContainers: [{name: i, image: i}]}}",
		changed[*corev1.Pod]{change: set(func(s *corev1.PodSpec) { s.Containers[0].Image, s.InitContainers[0].Image = "j", "j" }), generation: 2},
		changed[*corev1.Pod]{change: set(func(s *corev1.PodSpec) { s.Containers[0].Args = []string{"x"} }), want: rule + "containers", generation: 2},
		changed[*corev1.Pod]{change: set(func(s *corev1.PodSpec) { s.Subdomain, s.HostNetwork = "x", true }), want: rule + "hostNetwork, spec.subdomain", generation: 2},
		changed[*corev1.Pod]{change: set(func(s *corev1.PodSpec) { s.InitContainers = nil }), generation: 2,
			want: "spec.initContainers: Forbidden: pod updates may not add or remove containers"},
		changed[*corev1.Pod]{change: set(func(s *corev1.PodSpec) { s.ActiveDeadlineSeconds = ptr(int64(11)) }), generation: 2,
			want: "spec.activeDeadlineSeconds: Invalid value: 11: must be less than or equal to previous value"},
		changed[*corev1.Pod]{change: set(func(s *corev1.PodSpec) { s.ActiveDeadlineSeconds = nil }), generation: 2,
			want: "spec.activeDeadlineSeconds: Invalid value: null: must not update from a positive integer to nil value"},
		changed[*corev1.Pod]{change: set(func(s *corev1.PodSpec) { s.Tolerations = nil }), generation: 2,
			want: "spec.tolerations: Forbidden: existing toleration can not be modified except its tolerationSeconds"},
		changed[*corev1.Pod]{change: set(func(s *corev1.PodSpec) { s.SchedulingGates[0].Name = "h" }), generation: 2,
			want: "spec.schedulingGates[0].name: Forbidden: only deletion is allowed, but found new scheduling gate 'h'"},
		changed[*corev1.Pod]{change: set(func(s *corev1.PodSpec) { s.NodeSelector = map[string]string{"c": "d"} }), generation: 2,
			want: `spec.nodeSelector: Invalid value: {"c":"d"}: only additions to spec.nodeSelector are allowed (no mutations or deletions)`},
		changed[*corev1.Pod]{change: set(func(s *corev1.PodSpec) { s.EphemeralContainers = []corev1.EphemeralContainer{{}} }), generation: 2,
			want: "spec.ephemeralContainers[0].name: Required value\nspec.ephemeralContainers[0].image: Required value\n" +
				rule + "ephemeralContainers"},
		changed[*corev1.Pod]{sub: "resize", change: set(func(s *corev1.PodSpec) { s.InitContainers[0].Name = "j" }), generation: 2,
			want: "spec.initContainers[0].name: Forbidden: initContainers may not be renamed or reordered on resize"},
		changed[*corev1.Pod]{sub: "status", generation: 1, change: func(p *corev1.Pod) {
			p.Annotations["container.apparmor.security.beta.kubernetes.io/c"] = "unconfined"
		}, want: "metadata.annotations[container.apparmor.security.beta.kubernetes.io/c]: Forbidden: may not add AppArmor annotations"},
	)
	for sub, want := range map[string]string{"resize": "static pods cannot be resized", "ephemeralcontainers": "static pods do not support ephemeral containers"} {
		changes(t, "{metadata: {name: a, annotations: {kubernetes.io/config.mirror: x}}, spec: {nodeName: n, containers: [{name: c, image: i}]}}",
			changed[*corev1.Pod]{sub: sub, change: func(*corev1.Pod) {}, want: "[]: Forbidden: " + want, generation: 1})
	}
}

// The provider's ID of a node is for life, and each change of it has its own fault. F38
func TestProviderIDStays(t *testing.T) {
	id := func(text string) func(*corev1.Node) { return func(n *corev1.Node) { n.Spec.ProviderID = text } }
	const at = "spec.providerID: Invalid value: null: field cannot be "
	changes(t, "{metadata: {name: a}, spec: {providerID: x}}",
		changed[*corev1.Node]{change: id("x")},
		changed[*corev1.Node]{generation: 1, change: id("y"), want: at + "modified once set"},
		changed[*corev1.Node]{generation: 1, change: id(""), want: at + "cleared once set"},
	)
}
