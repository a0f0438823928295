package kinds

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
)

// defaulted compares an object's defaulted form with the one expected, as YAML.
func defaulted[P api.Object](t *testing.T, text, want string) {
	t.Helper()
	o := load[P](t, text)
	var wantMap, gotMap map[string]any
	data, err := yaml.Marshal(o)
	if err == nil {
		err = yaml.Unmarshal(data, &gotMap)
	}
	if err == nil {
		err = yaml.Unmarshal([]byte(want), &wantMap)
	}
	if err != nil {
		t.Fatal(err)
	}
	delete(gotMap, "metadata")
	delete(gotMap, "status")
	delete(wantMap, "metadata")
	if d := cmp.Diff(wantMap, gotMap); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// F37
func TestPodDefaults(t *testing.T) {
	defaulted[*corev1.Pod](t, `
metadata: {name: a}
spec:
  serviceAccountName: app
  initContainers:
  - {name: i, image: "reg:5000/tool@sha256:abc"}
  containers:
  - name: c
    image: reg:5000/app
    ports: [{containerPort: 80}]
    env: [{name: IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}]
    resources: {limits: {cpu: "1", memory: 1Gi}, requests: {cpu: 500m}}
    readinessProbe: {httpGet: {port: 80}}
    livenessProbe: {grpc: {port: 90}}
    lifecycle: {preStop: {httpGet: {port: 80}}}
  - {name: d, image: "app:v1", imagePullPolicy: Never}
  - {name: e, image: "app:latest"}
  volumes:
  - {name: scratch}
  - {name: host, hostPath: {path: /a}}
  - {name: cm, configMap: {name: c}}
  - {name: s, secret: {secretName: s}}
  - name: p
    projected:
      sources:
      - serviceAccountToken: {path: token}
      - downwardAPI: {items: [{path: l, fieldRef: {fieldPath: metadata.labels}}]}
`, `
spec:
  serviceAccountName: app
  serviceAccount: app
  restartPolicy: Always
  dnsPolicy: ClusterFirst
  schedulerName: default-scheduler
  securityContext: {}
  terminationGracePeriodSeconds: 30
  enableServiceLinks: true
  initContainers:
  - {name: i, image: "reg:5000/tool@sha256:abc", imagePullPolicy: IfNotPresent, resources: {}, terminationMessagePath: /dev/termination-log, terminationMessagePolicy: File}
  containers:
  - name: c
    image: reg:5000/app
    imagePullPolicy: Always
    terminationMessagePath: /dev/termination-log
    terminationMessagePolicy: File
    ports: [{containerPort: 80, protocol: TCP}]
    env: [{name: IP, valueFrom: {fieldRef: {apiVersion: v1, fieldPath: status.podIP}}}]
    resources: {limits: {cpu: "1", memory: 1Gi}, requests: {cpu: 500m, memory: 1Gi}}
    readinessProbe: {httpGet: {path: /, port: 80, scheme: HTTP}, timeoutSeconds: 1, periodSeconds: 10, successThreshold: 1, failureThreshold: 3}
    livenessProbe: {grpc: {port: 90, service: ""}, timeoutSeconds: 1, periodSeconds: 10, successThreshold: 1, failureThreshold: 3}
    lifecycle: {preStop: {httpGet: {path: /, port: 80, scheme: HTTP}}}
  - {name: d, image: "app:v1", imagePullPolicy: Never, resources: {}, terminationMessagePath: /dev/termination-log, terminationMessagePolicy: File}
  - {name: e, image: "app:latest", imagePullPolicy: Always, resources: {}, terminationMessagePath: /dev/termination-log, terminationMessagePolicy: File}
  volumes:
  - {name: scratch, emptyDir: {}}
  - {name: host, hostPath: {path: /a, type: ""}}
  - {name: cm, configMap: {name: c, defaultMode: 420}}
  - {name: s, secret: {secretName: s, defaultMode: 420}}
  - name: p
    projected:
      defaultMode: 420
      sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3600}
      - downwardAPI: {items: [{path: l, fieldRef: {apiVersion: v1, fieldPath: metadata.labels}}]}
`)
}

func TestDeploymentDefaults(t *testing.T) {
	defaulted[*appsv1.Deployment](t, `
metadata: {name: a}
spec:
  selector: {matchLabels: {app: a}}
  template:
    metadata: {labels: {app: a}}
    spec:
      containers: [{name: c, image: "x:1", resources: {limits: {cpu: "1"}}}]
`, `
spec:
  replicas: 1
  revisionHistoryLimit: 10
  progressDeadlineSeconds: 600
  strategy: {type: RollingUpdate, rollingUpdate: {maxSurge: 25%, maxUnavailable: 25%}}
  selector: {matchLabels: {app: a}}
  template:
    metadata: {labels: {app: a}}
    spec:
      restartPolicy: Always
      dnsPolicy: ClusterFirst
      schedulerName: default-scheduler
      securityContext: {}
      terminationGracePeriodSeconds: 30
      containers:
      - {name: c, image: "x:1", imagePullPolicy: IfNotPresent, resources: {limits: {cpu: "1"}}, terminationMessagePath: /dev/termination-log, terminationMessagePolicy: File}
`)
}

func TestServiceDefaults(t *testing.T) {
	defaulted[*corev1.Service](t, `
metadata: {name: a}
spec: {selector: {app: a}, ports: [{port: 80}]}
`, `
spec:
  type: ClusterIP
  sessionAffinity: None
  internalTrafficPolicy: Cluster
  selector: {app: a}
  ports: [{port: 80, protocol: TCP, targetPort: 80}]
`)
	defaulted[*corev1.Service](t, `
metadata: {name: a}
spec: {type: LoadBalancer, sessionAffinity: ClientIP, clusterIP: 10.96.0.9, ports: [{port: 80, targetPort: http}]}
`, `
spec:
  type: LoadBalancer
  sessionAffinity: ClientIP
  sessionAffinityConfig: {clientIP: {timeoutSeconds: 10800}}
  internalTrafficPolicy: Cluster
  externalTrafficPolicy: Cluster
  allocateLoadBalancerNodePorts: true
  clusterIP: 10.96.0.9
  clusterIPs: [10.96.0.9]
  ports: [{port: 80, protocol: TCP, targetPort: http}]
`)
	defaulted[*corev1.Service](t, "{metadata: {name: a}, spec: {type: ExternalName, externalName: example.com}}",
		"{spec: {type: ExternalName, externalName: example.com, sessionAffinity: None}}")
}

func TestOtherDefaults(t *testing.T) {
	defaulted[*corev1.Secret](t, "{metadata: {name: a}, data: {a: YQ==}, stringData: {b: b}}", "{type: Opaque, data: {a: YQ==, b: Yg==}}")
	defaulted[*storagev1.StorageClass](t, "{metadata: {name: a}, provisioner: p}",
		"{provisioner: p, reclaimPolicy: Delete, volumeBindingMode: Immediate}")
	defaulted[*storagev1.CSIDriver](t, "{metadata: {name: a}, spec: {}}", `{spec: {attachRequired: true, podInfoOnMount: false,
 storageCapacity: false, requiresRepublish: false, seLinuxMount: false, fsGroupPolicy: ReadWriteOnceWithFSType, volumeLifecycleModes: [Persistent]}}`)
	defaulted[*rbacv1.RoleBinding](t, "{metadata: {name: a}, roleRef: {kind: Role, name: r}, subjects: [{kind: User, name: u}, {kind: ServiceAccount, name: s}]}",
		`{roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: r},
 subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: u}, {kind: ServiceAccount, name: s}]}`)
	if ns := load[*corev1.Namespace](t, "{metadata: {name: a}}"); ns.Labels["kubernetes.io/metadata.name"] != "a" || ns.Status.Phase != "Active" {
		t.Errorf("namespace %+v", ns)
	}
}

func TestImageTag(t *testing.T) {
	for image, want := range map[string]string{
		"nginx": "latest", "nginx:1": "1", "host:5000/nginx": "latest", "host:5000/nginx:latest": "latest",
		"nginx@sha256:ab": "", "host:5000/nginx:2@sha256:ab": "2", "": "latest",
	} {
		if got := podspec.ImageTag(image); got != want {
			t.Errorf("%q: %q, want %q", image, got, want)
		}
	}
}
