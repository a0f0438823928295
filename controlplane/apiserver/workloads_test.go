package apiserver_test

import (
	"maps"
)

// The valid objects of the kinds that make pods, scale who makes them, and bound them.
func init() {
	const lasting = "selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: " +
		"[{name: c, image: i}]}}"
	const ending = "template: {spec: {restartPolicy: Never, containers: [{name: c, image: i}]}}"
	maps.Copy(valid, map[string]string{
		"ReplicationController": "{spec: {template: {metadata: {labels: {a: b}}, spec: {containers: " +
			"[{name: c, image: i}]}}}}",
		"PodTemplate":   "{template: {spec: {containers: [{name: c, image: i}]}}}",
		"LimitRange":    "{spec: {limits: [{type: Container, max: {cpu: 1}}]}}",
		"ResourceQuota": "{spec: {hard: {pods: 1}}}",
		"StatefulSet": "{spec: {" + lasting +
			", volumeClaimTemplates: [{metadata: {name: v}, spec: {accessModes: [ReadWriteOnce], resources: " +
			"{requests: {storage: 1Gi}}}}]}}",
		"DaemonSet":          "{spec: {" + lasting + "}}",
		"ControllerRevision": "{data: {a: b}, revision: 1}",
		"Job":                "{spec: {" + ending + "}}",
		"CronJob":            "{spec: {schedule: '* * * * *', jobTemplate: {spec: {" + ending + "}}}}",
		"HorizontalPodAutoscaler": "{spec: {maxReplicas: 2, scaleTargetRef: {apiVersion: apps/v1, kind: " +
			"Deployment, name: d}}}",
		"HorizontalPodAutoscaler.autoscaling": "{spec: {maxReplicas: 2, scaleTargetRef: {apiVersion: apps/v1, kind: " +
			"Deployment, name: d}}}",
	})
}
