package podspec_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// F37
func TestPodDefaults(t *testing.T) {
	kindstest.CheckDefaults[*corev1.Pod](t, `
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
