package noderestriction

import (
	"iter"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/podref"
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/controlplane/apiserver/admission/admissiontest"
)

// references maps the fields of PodSpec that reference another object or request a credential to
// the referenced resource. Containers, init containers and ephemeral containers have the same
// fields.
var references = map[string]string{
	"spec.serviceAccountName": "serviceaccounts",
	"spec.serviceAccount":     "serviceaccounts",

	"spec.imagePullSecrets[].name":                           "secrets",
	"spec.containers[].env[].valueFrom.secretKeyRef.name":    "secrets",
	"spec.containers[].env[].valueFrom.configMapKeyRef.name": "configmaps",
	"spec.containers[].envFrom[].secretRef.name":             "secrets",
	"spec.containers[].envFrom[].configMapRef.name":          "configmaps",
	"spec.resourceClaims[].resourceClaimName":                "resourceclaims",
	"spec.resourceClaims[].resourceClaimTemplateName":        "resourceclaimtemplates",
	"spec.schedulingGroup.podGroupName":                      "podgroups",
	"spec.volumes[].secret.secretName":                       "secrets",
	"spec.volumes[].configMap.name":                          "configmaps",
	"spec.volumes[].persistentVolumeClaim.claimName":         "persistentvolumeclaims",
	"spec.volumes[].ephemeral":                               "persistentvolumeclaims",
	"spec.volumes[].csi":                                     "csidrivers",
	"spec.volumes[].csi.nodePublishSecretRef.name":           "secrets",
	"spec.volumes[].projected.sources[].secret.name":         "secrets",
	"spec.volumes[].projected.sources[].configMap.name":      "configmaps",
	"spec.volumes[].projected.sources[].serviceAccountToken": "serviceaccounts",
	"spec.volumes[].projected.sources[].clusterTrustBundle":  "clustertrustbundles",
	"spec.volumes[].projected.sources[].podCertificate":      "podcertificaterequests",
	"spec.volumes[].azureFile.secretName":                    "secrets",
	"spec.volumes[].cephfs.secretRef.name":                   "secrets",
	"spec.volumes[].cinder.secretRef.name":                   "secrets",
	"spec.volumes[].flexVolume.secretRef.name":               "secrets",
	"spec.volumes[].glusterfs.endpoints":                     "endpoints",
	"spec.volumes[].iscsi.secretRef.name":                    "secrets",
	"spec.volumes[].rbd.secretRef.name":                      "secrets",
	"spec.volumes[].scaleIO.secretRef.name":                  "secrets",
	"spec.volumes[].storageos.secretRef.name":                "secrets",
}

// plain are the other string fields, with everything below them. They do not reference objects that
// a node could read. Classes are the same for all nodes.
var plain = []string{
	"spec.activeDeadlineSeconds", "spec.affinity", "spec.dnsConfig", "spec.dnsPolicy", "spec.evictionResponders",
	"spec.hostAliases",
	"spec.hostname", "spec.hostnameOverride", "spec.nodeName", "spec.nodeSelector", "spec.os", "spec.overhead",
	"spec.preemptionPolicy",
	"spec.priorityClassName", "spec.readinessGates", "spec.resources", "spec.restartPolicy", "spec.runtimeClassName",
	"spec.schedulerName",
	"spec.schedulingGates", "spec.securityContext", "spec.subdomain", "spec.tolerations",
	"spec.topologySpreadConstraints",
	"spec.resourceClaims[].name",

	"spec.containers[].args", "spec.containers[].command", "spec.containers[].env[].name",
	"spec.containers[].env[].value",
	"spec.containers[].env[].valueFrom.configMapKeyRef.key", "spec.containers[].env[].valueFrom.secretKeyRef.key",
	"spec.containers[].env[].valueFrom.fieldRef", "spec.containers[].env[].valueFrom.resourceFieldRef",
	"spec.containers[].env[].valueFrom.fileKeyRef", "spec.containers[].envFrom[].prefix",
	"spec.containers[].image", "spec.containers[].imagePullPolicy", "spec.containers[].lifecycle",
	"spec.containers[].livenessProbe",
	"spec.containers[].name", "spec.containers[].ports", "spec.containers[].readinessProbe",
	"spec.containers[].resizePolicy",
	"spec.containers[].resources", "spec.containers[].restartPolicy", "spec.containers[].restartPolicyRules",
	"spec.containers[].securityContext", "spec.containers[].startupProbe", "spec.containers[].targetContainerName",
	"spec.containers[].terminationMessagePath", "spec.containers[].terminationMessagePolicy",
	"spec.containers[].volumeDevices",
	"spec.containers[].volumeMounts", "spec.containers[].workingDir",

	"spec.volumes[].name", "spec.volumes[].hostPath", "spec.volumes[].emptyDir", "spec.volumes[].gcePersistentDisk",
	"spec.volumes[].awsElasticBlockStore", "spec.volumes[].gitRepo", "spec.volumes[].secret.items",
	"spec.volumes[].nfs",
	"spec.volumes[].iscsi", "spec.volumes[].glusterfs.path", "spec.volumes[].rbd", "spec.volumes[].flexVolume",
	"spec.volumes[].cinder",
	"spec.volumes[].cephfs", "spec.volumes[].flocker", "spec.volumes[].downwardAPI", "spec.volumes[].fc",
	"spec.volumes[].azureFile.shareName",
	"spec.volumes[].configMap.items", "spec.volumes[].vsphereVolume", "spec.volumes[].quobyte",
	"spec.volumes[].azureDisk",
	"spec.volumes[].photonPersistentDisk", "spec.volumes[].portworxVolume", "spec.volumes[].scaleIO",
	"spec.volumes[].storageos",
	"spec.volumes[].image",
	"spec.volumes[].projected.sources[].secret.items", "spec.volumes[].projected.sources[].configMap.items",
	"spec.volumes[].projected.sources[].downwardAPI",
}

// leaf is a string field of PodSpec and its path.
type leaf struct {
	path string
	set  func(reflect.Value) // sets the field in a PodSpec
}

// leaves yields all fields of a type that can contain strings. to returns the value of the type in
// a PodSpec.
func leaves(t reflect.Type, path string, to func(reflect.Value) reflect.Value) []leaf {
	switch t.Kind() {
	case reflect.Pointer:
		return leaves(t.Elem(), path, func(v reflect.Value) reflect.Value {
			p := to(v)
			if p.IsNil() {
				p.Set(reflect.New(t.Elem()))
			}
			return p.Elem()
		})
	case reflect.Slice:
		return leaves(t.Elem(), path+"[]", func(v reflect.Value) reflect.Value {
			s := to(v)
			if s.Len() == 0 {
				s.Set(reflect.MakeSlice(t, 1, 1))
			}
			return s.Index(0)
		})
	case reflect.Map:
		return []leaf{{path, func(v reflect.Value) { to(v).Set(reflect.MakeMap(t)) }}}
	case reflect.String:
		return []leaf{{path, func(v reflect.Value) { to(v).SetString("x") }}}
	case reflect.Struct:
		var out []leaf
		for i := range t.NumField() {
			f := t.Field(i)
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if !f.IsExported() || name == "-" {
				continue
			}
			below := path
			if name != "" {
				below += "." + name
			}
			out = append(out, leaves(f.Type, below, func(v reflect.Value) reflect.Value { return to(v).Field(i) })...)
		}
		return out
	}
	return nil
}

// within returns the longest of the classified fields that is path or a parent of path.
func within(path string, fields iter.Seq[string]) (longest string) {
	for f := range fields {
		below := path == f || strings.HasPrefix(path, f+".") || strings.HasPrefix(path, f+"[]")
		if below && len(f) > len(longest) {
			longest = f
		}
	}
	return longest
}

// Every string field of PodSpec is classified as a reference or as plain. Every reference is found
// by podref and rejected in a mirror pod with its field name. A new upstream field fails this test
// until it is classified.
func TestMirrorPodsReferToNothing(t *testing.T) {
	refuse := CheckMirrorPods(admissiontest.World{})
	found := map[string]bool{}
	for _, l := range leaves(reflect.TypeFor[corev1.PodSpec](), "spec", func(v reflect.Value) reflect.Value {
		return v
	}) {
		path := strings.NewReplacer("spec.initContainers[]", "spec.containers[]", "spec.ephemeralContainers[]",
			"spec.containers[]").Replace(l.path)
		reference, text := within(path, maps.Keys(references)), within(path, slices.Values(plain))
		switch {
		case reference == "" && text == "":
			t.Errorf("%s is classified neither as a reference nor as plain: say which it is, and teach podref a "+
				"reference", l.path)
			continue
		case len(text) >= len(reference):
			continue
		}
		found[reference] = true
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "m", Namespace: "default"}}
		l.set(reflect.ValueOf(&pod.Spec).Elem())
		refs := slices.Collect(podref.References(pod))
		if len(refs) == 0 {
			t.Errorf("%s: podref sees no reference", l.path)
			continue
		}
		want := strings.Replace(l.path, path, reference, 1)
		if l.path != path { // of an init or ephemeral container
			want = strings.Replace(reference, "spec.containers[]", l.path[:strings.Index(l.path, "[]")+2], 1)
		}
		if !slices.ContainsFunc(refs, func(r podref.Ref) bool {
			return r.Path() == want && r.Resource == references[reference]
		}) {
			t.Errorf("%s: podref sees %v, want %s of %s", l.path, refs, references[reference], want)
		}
		if err := refuse(t.Context(), creation(pod)); err != nil {
			t.Errorf("%s in an ordinary pod: %v", l.path, err)
		}
		pod.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
		err := refuse(t.Context(), creation(pod))
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), refs[0].Field()) {
			t.Errorf("%s in a mirror pod: %v", l.path, err)
		}
	}
	for f := range references {
		if !found[f] {
			t.Errorf("%s is no field of PodSpec", f)
		}
	}
}

// creation returns the attempt to create a pod.
func creation(pod *corev1.Pod) *admission.Attempt {
	return &admission.Attempt{Kind: podsKind(), Operation: api.Create, Namespace: pod.Namespace, Name: pod.Name,
		Object: pod, Whole: pod,
		Request: &api.Request{Verb: api.VerbCreate, Kind: podsKind(), Namespace: pod.Namespace, Name: pod.Name}}
}

func podsKind() *api.Kind {
	return kinds.All().ByResource(schema.GroupVersionResource{Version: "v1", Resource: "pods"})
}

// The owner of a mirror pod is the current Node object, or it has no owner.
func TestMirrorPodsAreOwnedByTheirNode(t *testing.T) {
	cluster := admissiontest.World{"nodes": {&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a", UID: "1"}}}}
	yes := true
	owner := func(kind, name string, uid types.UID) metav1.OwnerReference {
		return metav1.OwnerReference{APIVersion: "v1", Kind: kind, Name: name, UID: uid, Controller: &yes}
	}
	blocking, free := owner("Node", "a", "1"), owner("Node", "a", "1")
	blocking.BlockOwnerDeletion, free.Controller = &yes, nil
	for what, c := range map[string]struct {
		owners []metav1.OwnerReference
		ok     bool
	}{
		"nobody":         {nil, true},
		"its node":       {[]metav1.OwnerReference{owner("Node", "a", "1")}, true},
		"an old node":    {[]metav1.OwnerReference{owner("Node", "a", "0")}, false},
		"another node":   {[]metav1.OwnerReference{owner("Node", "b", "1")}, false},
		"a pod":          {[]metav1.OwnerReference{owner("Pod", "a", "1")}, false},
		"node and other": {[]metav1.OwnerReference{owner("Node", "a", "1"), owner("ConfigMap", "c", "2")}, false},
		"blocking":       {[]metav1.OwnerReference{blocking}, false},
		"no controller":  {[]metav1.OwnerReference{free}, false},
	} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			Name: "m", Namespace: "default", Annotations: map[string]string{corev1.MirrorPodAnnotationKey: "x"},
			OwnerReferences: c.owners,
		}, Spec: corev1.PodSpec{NodeName: "a"}}
		err := CheckMirrorPods(cluster)(t.Context(), creation(pod))
		if c.ok != (err == nil) || err != nil && !strings.Contains(err.Error(), "metadata.ownerReferences[") {
			t.Errorf("owned by %s: %v", what, err)
		}
	}
}
