package testcluster

import (
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// NewService returns a Service for the pods of the Deployment with the given name.
func NewService(name string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: corev1.ServiceSpec{
		Selector: map[string]string{"app": name}, ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"},
		IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
		Ports: []corev1.ServicePort{{Name: "http", Port: 80, TargetPort: intstr.FromString("http"),
			Protocol: corev1.ProtocolTCP}},
	}}
}

// StorageSize returns a list with this amount of storage.
func StorageSize(size string) corev1.ResourceList {
	return corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}
}

// NewVolume returns a hostPath PersistentVolume of this size without a StorageClass.
func NewVolume(name, size string) *corev1.PersistentVolume {
	return &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeSpec{
		Capacity: StorageSize(size), AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
		PersistentVolumeSource: corev1.PersistentVolumeSource{
			HostPath: &corev1.HostPathVolumeSource{Path: "/data"}},
	}}
}

// NewClaim returns a claim in namespace default that requests size and no StorageClass.
func NewClaim(name, size string) *corev1.PersistentVolumeClaim {
	class := ""
	return &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: &class, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: StorageSize(size)},
		}}
}

// NewCronJob returns a CronJob that creates Jobs with the spec of job. change may modify the spec
// of the CronJob.
func NewCronJob(name, schedule string, job *batchv1.Job, change ...func(*batchv1.CronJobSpec)) *batchv1.CronJob {
	c := &batchv1.CronJob{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: batchv1.CronJobSpec{Schedule: schedule, JobTemplate: batchv1.JobTemplateSpec{Spec: job.Spec}}}
	for _, f := range change {
		f(&c.Spec)
	}
	return c
}

// NewDaemonSet returns a DaemonSet for the nodes with the labels in selector.
func NewDaemonSet(name, image string, selector map[string]string) *appsv1.DaemonSet {
	d := NewDeployment(name, 1, image)
	d.Spec.Template.Spec.NodeSelector = selector
	return &appsv1.DaemonSet{ObjectMeta: d.ObjectMeta,
		Spec: appsv1.DaemonSetSpec{Selector: d.Spec.Selector, Template: d.Spec.Template}}
}

// NewIngressClass returns an IngressClass of a controller.
func NewIngressClass(name, controller string) *networkingv1.IngressClass {
	return &networkingv1.IngressClass{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: networkingv1.IngressClassSpec{Controller: controller}}
}

// NewJob returns a Job of n completions. Its pods end as soon as they are bound: they succeed for
// ends "well", and fail for ends "badly".
func NewJob(name string, n, parallel int32, ends string) *batchv1.Job {
	return &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: batchv1.JobSpec{
		Completions: &n, Parallelism: &parallel,
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"ends": ends}},
			Spec: corev1.PodSpec{
				RestartPolicy: corev1.RestartPolicyNever,
				Containers:    []corev1.Container{{Name: "c", Image: "work:1"}}}},
	}}
}

// NewDeviceRequest returns the spec of a claim for one device.
func NewDeviceRequest() resourcev1.ResourceClaimSpec {
	return resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{
		{Name: "r", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: "gpu.example.com"}}}}}
}

// NewDevicePod returns a pod that requests a device by the ResourceClaimTemplate "gpu".
func NewDevicePod(name string) *corev1.Pod {
	template := "gpu"
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: NewDeployment("x", 1, "x").Spec.Template.Spec}
	p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: &template}}
	return p
}

// NewStatefulSet returns a StatefulSet with a claim of 1Gi for each pod.
func NewStatefulSet(name string, n int32, image string) *appsv1.StatefulSet {
	d := NewDeployment(name, n, image)
	return &appsv1.StatefulSet{
		ObjectMeta: d.ObjectMeta,
		Spec: appsv1.StatefulSetSpec{
			Replicas: &n, Selector: d.Spec.Selector, Template: d.Spec.Template, ServiceName: name,
			VolumeClaimTemplates: []corev1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Name: "data"},
				Spec: corev1.PersistentVolumeClaimSpec{
					AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
					Resources: corev1.VolumeResourceRequirements{
						Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
				}}},
		},
	}
}

// NewDriverVolume returns a PersistentVolume of a CSI driver. Its handle is its name.
func NewDriverVolume(name, driver string) *corev1.PersistentVolume {
	v := NewVolume(name, "1Gi")
	v.Spec.HostPath = nil
	v.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: driver, VolumeHandle: name}
	return v
}
