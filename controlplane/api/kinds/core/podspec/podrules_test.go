package podspec_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

const podRulesOfKubernetesC0, podRulesOfKubernetesV0 = "spec.containers[0].", "spec.volumes[0]."

func podRulesOfKubernetesEnv(from string) string {
	return "{metadata: {name: a}, spec: {volumes: [{name: e, emptyDir: {}}, {name: s, secret: {secretName: s}}], " +
		"containers: [{name: c, image: i, env: [{name: E, valueFrom: {" + from + "}}]}]}}"
}

func podRulesOfKubernetesVolume(source string) string {
	return podWith("volumes: [{name: v, " + source + "}]")
}

func podRulesOfKubernetesDevices(list string) string {
	return "{metadata: {name: a}, spec: {volumes: [{name: b, persistentVolumeClaim: {claimName: b}}, {name: p, " +
		"persistentVolumeClaim: {claimName: p}}], containers: [{name: c, image: i, " + list + "}]}}"
}

func podRulesOfKubernetesAnnotated(key, value string) string {
	return "{metadata: {name: a, annotations: {" + key + ": '" + value +
		"'}}, spec: {containers: [{name: c, image: i}]}}"
}

const podRulesOfKubernetesFile = podRulesOfKubernetesC0 + "env[0].valueFrom.fileKeyRef."

// podRulesOfKubernetesCases are the cases of TestPodRulesOfKubernetes.
var podRulesOfKubernetesCases = []kindstest.BadObject{
	{Text: podContainer("securityContext: {procMount: Unmasked}"),
		Want: kindstest.InvalidText(podRulesOfKubernetesC0+"securityContext.procMount", "Unmasked",
			"`hostUsers` must be false to use `Unmasked`")},
	{Text: podWith("os: {name: plan9}"),
		Want: `spec.os: Unsupported value: "plan9": supported values: "linux", "windows"`},
	{Text: podWith("os: {}"), Want: "spec.os.name: Required value"},
	{Text: podWith("hostPID: true, shareProcessNamespace: true"),
		Want: "spec.shareProcessNamespace: Invalid value: true: ShareProcessNamespace and HostPID cannot " +
			"both be enabled"},
	{Text: podWith("hostUsers: false, hostPID: true"),
		Want: "spec.HostPID: Forbidden: when `hostUsers` is false"},
	{Text: podRulesOfKubernetesEnv("fileKeyRef: {volumeName: e, path: f, key: K}"), Want: ""},
	{Text: podRulesOfKubernetesEnv("fileKeyRef: {volumeName: s, path: f, key: K}"),
		Want: kindstest.InvalidText(podRulesOfKubernetesFile+"volumeName", "s",
			"referenced volume must be of type emptyDir")},
	{Text: podRulesOfKubernetesEnv("fileKeyRef: {volumeName: none, path: ../f, key: a=b}"),
		Want: kindstest.InvalidText(podRulesOfKubernetesFile+"key", "a=b",
			"a valid environment variable name must consist only of printable ASCII "+
				"characters other than '='") + "\n" +
			kindstest.InvalidText(podRulesOfKubernetesFile+"path", "../f", "must not contain '..'") +
			"\n" + podRulesOfKubernetesFile + `volumeName: Not found: "none"`},
	{Text: podRulesOfKubernetesEnv(""), Want: kindstest.InvalidText(podRulesOfKubernetesC0+"env[0].valueFrom", "",
		"must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`")},
	{Text: podRulesOfKubernetesEnv("fieldRef: {fieldPath: spec.host}"), Want: ""},
	{Text: podRulesOfKubernetesEnv("resourceFieldRef: {resource: limits.memory, divisor: 1024}"),
		Want: kindstest.InvalidText(podRulesOfKubernetesC0+"env[0].valueFrom.resourceFieldRef.divisor", "limits.memory",
			"only divisor's values 1, 1k, 1M, 1G, 1T, 1P, 1E, 1Ki, 1Mi, 1Gi, 1Ti, 1Pi, 1Ei are supported with the "+
				"memory resource")},
	{Text: podContainer("envFrom: [{secretRef: {name: a-}}]"), Want: ""},
	{Text: podRulesOfKubernetesVolume("emptyDir: {}, hostPath: {path: ''}, nfs: {}"),
		Want: podRulesOfKubernetesV0 + "hostPath: Forbidden: may not specify more than 1 volume type\n" +
			podRulesOfKubernetesV0 + "nfs: Forbidden: may not specify more than 1 volume type"},
	{Text: podRulesOfKubernetesVolume("csi: {driver: x.io, nodePublishSecretRef: {name: ''}}"),
		Want: podRulesOfKubernetesV0 + "csi.nodePublishSecretRef.name: Required value"},
	{Text: podRulesOfKubernetesVolume("downwardAPI: {items: [{path: p}]}"),
		Want: podRulesOfKubernetesV0 + "downwardAPI: Required value: one of fieldRef and resourceFieldRef is required"},
	{Text: podRulesOfKubernetesVolume("projected: {sources: [{}]}"), Want: ""},
	{Text: podRulesOfKubernetesVolume("projected: {sources: [{secret: {name: a}, configMap: {name: b}}]}"),
		Want: podRulesOfKubernetesV0 + "projected.sources[0]: Forbidden: may not specify more than 1 volume " +
			"type per source"},
	{Text: podRulesOfKubernetesVolume("projected: {sources: [{serviceAccountToken: {path: t}}]}"),
		Want: podRulesOfKubernetesV0 + "projected.sources[0].serviceAccountToken: Forbidden: must not be " +
			"specified when serviceAccountName is not set"},
	{Text: podRulesOfKubernetesDevices("volumeDevices: [{name: b, devicePath: /a}, {name: b, devicePath: /a}]"),
		Want: kindstest.InvalidText(podRulesOfKubernetesC0+"volumeDevices[1].name", "b", "must be unique") + "\n" +
			kindstest.InvalidText(podRulesOfKubernetesC0+"volumeDevices[1].devicePath", "/a", "must be unique")},
	{Text: podRulesOfKubernetesDevices("volumeMounts: [{name: b, mountPath: /a}], volumeDevices: [{name: b, " +
		"devicePath: /a}]"),
		Want: kindstest.InvalidText(podRulesOfKubernetesC0+"volumeMounts[0].name", "b",
			"must not already exist in volumeDevices") +
			"\n" +
			kindstest.InvalidText(podRulesOfKubernetesC0+"volumeMounts[0].mountPath", "/a",
				"must not already exist as a path in volumeDevices") + "\n" +
			kindstest.InvalidText(podRulesOfKubernetesC0+"volumeDevices[0].name", "b",
				"must not already exist in volumeMounts") +
			"\n" +
			kindstest.InvalidText(podRulesOfKubernetesC0+"volumeDevices[0].devicePath", "/a",
				"must not already exist as a path in volumeMounts")},
	{Text: podContainer("livenessProbe: {exec: {command: [a]}, grpc: {port: 0}}"),
		Want: podRulesOfKubernetesC0 + "livenessProbe.grpc: Forbidden: may not specify more than 1 handler type"},
	{Text: podWith("initContainers: [{name: i, image: i, ports: [{containerPort: 1, hostPort: " +
		"1}, {containerPort: 1, hostPort: 1}]}]"),
		Want: `spec.initContainers[0].ports[1].hostPort: Duplicate value: "TCP//1"`},
	{Text: podWith("resourceClaims: [{name: a, resourceClaimName: x}, {name: a, " +
		"resourceClaimName: y}]"), Want: `spec.resourceClaims[1].name: Duplicate value: "a"`},
	{Text: podWith("dnsConfig: {nameservers: [1.1.1.1, 1.1.1.2, 1.1.1.3, 1.1.1.4]}"),
		Want: `spec.dnsConfig.nameservers: Invalid value: ["1.1.1.1","1.1.1.2","1.1.1.3","1.1.1.4"]: must not ` +
			`have more than 3 nameservers`},
	{Text: podRulesOfKubernetesAnnotated("controller.kubernetes.io/pod-deletion-cost", "+1"),
		Want: kindstest.InvalidText("metadata.annotations[controller.kubernetes.io/pod-deletion-cost]", "+1",
			"must be a 32bit integer")},
	{Text: podRulesOfKubernetesAnnotated("controller.kubernetes.io/pod-deletion-cost", "-5"), Want: ""},
	{Text: podRulesOfKubernetesAnnotated("seccomp.security.alpha.kubernetes.io/pod", "x"),
		Want: kindstest.InvalidText("metadata.annotations.seccomp.security.alpha.kubernetes.io/pod", "x",
			"must be a valid seccomp profile")},
	{Text: podRulesOfKubernetesAnnotated("scheduler.alpha.kubernetes.io/tolerations",
		`[{"operator":"Exists","effect":"X"}]`),
		Want: `metadata.annotations.scheduler.alpha.kubernetes.io/tolerations[0].effect: Unsupported value: "X": ` +
			`supported values: "NoSchedule", "PreferNoSchedule", "NoExecute"`},
	{Text: "{metadata: {name: a, annotations: {seccomp.security.alpha.kubernetes.io/pod: " +
		"unconfined}}, spec: {securityContext: {seccompProfile: {type: RuntimeDefault}}, containers: " +
		"[{name: c, image: i}]}}",
		Want: "spec.securityContext.seccompProfile.type: Forbidden: seccomp type in annotation and " +
			"field must match"},
}

// Each rule of a new pod, with the field and the text of Kubernetes. F38
func TestPodRulesOfKubernetes(t *testing.T) {
	kindstest.CheckRefused[*corev1.Pod](t,
		podRulesOfKubernetesCases...)
	kindstest.CheckRefused[*corev1.PodTemplate](t,
		kindstest.BadObject{Text: "{metadata: {name: a}, template: {spec: {containers: [{name: c, image: ' i'}]}}}",
			Want: ""})
}

// An update of a pod changes images, the deadline, tolerations and gates; the fault of any other change names the fields. F38
func TestPodUpdateRules(t *testing.T) {
	const rule = "spec: Forbidden: " + podspec.PodUpdateRule + "\nchanged: spec."
	set := func(f func(*corev1.PodSpec)) func(*corev1.Pod) { return func(p *corev1.Pod) { f(&p.Spec) } }
	kindstest.CheckChanges(t, "{metadata: {name: a, annotations: {controller.kubernetes.io/pod-deletion-cost: x}}, "+
		"spec: {activeDeadlineSeconds: 10, nodeSelector: {a: b}, "+
		"schedulingGates: [{name: g}], tolerations: [{key: t, operator: Exists}], containers: [{name: c, image: i}], "+
		"initContainers: [{name: i, image: i}]}}",
		kindstest.Change[*corev1.Pod]{Change: set(func(s *corev1.PodSpec) {
			s.Containers[0].Image, s.InitContainers[0].Image = "j", "j"
		}), Generation: 2},
		kindstest.Change[*corev1.Pod]{Change: set(func(s *corev1.PodSpec) {
			s.Containers[0].Args = []string{"x"}
		}), Want: rule + "containers", Generation: 2},
		kindstest.Change[*corev1.Pod]{Change: set(func(s *corev1.PodSpec) {
			s.Subdomain, s.HostNetwork = "x", true
		}), Want: rule + "hostNetwork, spec.subdomain", Generation: 2},
		kindstest.Change[*corev1.Pod]{Change: set(func(s *corev1.PodSpec) { s.InitContainers = nil }), Generation: 2,
			Want: "spec.initContainers: Forbidden: pod updates may not add or remove containers"},
		kindstest.Change[*corev1.Pod]{Change: set(func(s *corev1.PodSpec) {
			s.ActiveDeadlineSeconds = new(int64(11))
		}), Generation: 2,
			Want: "spec.activeDeadlineSeconds: Invalid value: 11: must be less than or equal to previous value"},
		kindstest.Change[*corev1.Pod]{Change: set(func(s *corev1.PodSpec) {
			s.ActiveDeadlineSeconds = nil
		}), Generation: 2,
			Want: "spec.activeDeadlineSeconds: Invalid value: null: must not update from a positive " +
				"integer to nil value"},
		kindstest.Change[*corev1.Pod]{Change: set(func(s *corev1.PodSpec) { s.Tolerations = nil }), Generation: 2,
			Want: "spec.tolerations: Forbidden: existing toleration can not be modified except its tolerationSeconds"},
		kindstest.Change[*corev1.Pod]{Change: set(func(s *corev1.PodSpec) {
			s.SchedulingGates[0].Name = "h"
		}), Generation: 2,
			Want: "spec.schedulingGates[0].name: Forbidden: only deletion is allowed, but found new " +
				"scheduling gate 'h'"},
		kindstest.Change[*corev1.Pod]{Change: set(func(s *corev1.PodSpec) {
			s.NodeSelector = map[string]string{"c": "d"}
		}), Generation: 2,
			Want: `spec.nodeSelector: Invalid value: {"c":"d"}: only additions to spec.nodeSelector are allowed (no ` +
				`mutations or deletions)`},
		kindstest.Change[*corev1.Pod]{Change: set(func(s *corev1.PodSpec) {
			s.EphemeralContainers = []corev1.EphemeralContainer{{}}
		}), Generation: 2,
			Want: "spec.ephemeralContainers[0].name: Required value\nspec.ephemeralContainers[0].image: " +
				"Required value\n" +
				rule + "ephemeralContainers"},
		kindstest.Change[*corev1.Pod]{Sub: "resize", Change: set(func(s *corev1.PodSpec) {
			s.InitContainers[0].Name = "j"
		}), Generation: 2,
			Want: "spec.initContainers[0].name: Forbidden: initContainers may not be renamed or reordered on resize"},
		kindstest.Change[*corev1.Pod]{Sub: "status", Generation: 1, Change: func(p *corev1.Pod) {
			p.Annotations["container.apparmor.security.beta.kubernetes.io/c"] = "unconfined"
		}, Want: "metadata.annotations[container.apparmor.security.beta.kubernetes.io/c]: Forbidden: may not add " +
			"AppArmor annotations"},
	)
	for sub, want := range map[string]string{"resize": "static pods cannot be resized",
		"ephemeralcontainers": "static pods do not support ephemeral containers"} {
		kindstest.CheckChanges(t, "{metadata: {name: a, annotations: {kubernetes.io/config.mirror: x}}, spec: "+
			"{nodeName: n, containers: [{name: c, image: i}]}}",
			kindstest.Change[*corev1.Pod]{Sub: sub, Change: func(*corev1.Pod) {}, Want: "[]: Forbidden: " + want,
				Generation: 1})
	}
}
