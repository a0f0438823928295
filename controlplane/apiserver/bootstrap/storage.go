package bootstrap

import (
	"context"
	"errors"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

const (
	LocalDriver            = "local.csi.keelson.dev"
	localClass             = "standard"
	DefaultClassAnnotation = "storageclass.kubernetes.io/is-default-class"
	storageClassGiven      = "keelson.dev/storage-class-given"
)

// EnsureStorage creates the CSIDriver of the agents' local volumes if it is missing, so that every
// cluster has volumes. It creates StorageClass "standard" only once in a cluster's lifetime and
// records this in an annotation of Namespace kube-system. If a user changes or deletes the class,
// it is not restored. The class becomes the default class unless another class is.
func (s *Setup) EnsureStorage(ctx context.Context, fence uint64) error {
	yes, no, policy := true, false, storagev1.FileFSGroupPolicy
	driver := &storagev1.CSIDriver{
		ObjectMeta: metav1.ObjectMeta{Name: LocalDriver,
			Annotations: map[string]string{"keelson.dev/served-by": "agent"}},
		Spec: storagev1.CSIDriverSpec{AttachRequired: &no, PodInfoOnMount: &no, StorageCapacity: &yes,
			FSGroupPolicy:        &policy,
			VolumeLifecycleModes: []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent}},
	}
	return errors.Join(s.ensureObject(ctx, fence, driver), s.createStorageClassOnce(ctx, fence))
}

func (s *Setup) createStorageClassOnce(ctx context.Context, fence uint64) error {
	o, ok := s.config.Cluster.Get(ctx, "namespaces", "", metav1.NamespaceSystem)
	system, isNamespace := o.(*corev1.Namespace)
	if !ok || !isNamespace || system.Annotations[storageClassGiven] != "" {
		return nil // without the namespace, a later call creates it
	}
	wait, reclaim, grows := storagev1.VolumeBindingWaitForFirstConsumer, corev1.PersistentVolumeReclaimDelete, true
	class := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: localClass,
		Annotations: map[string]string{DefaultClassAnnotation: "true"}},
		Provisioner: LocalDriver, VolumeBindingMode: &wait, ReclaimPolicy: &reclaim, AllowVolumeExpansion: &grows}
	kind, err := s.servedKindOf(class)
	if kind == nil || err != nil {
		return err
	}
	list, err := s.config.Backend.Do(ctx, &api.Request{User: api.APIServerUser(), Verb: api.VerbList, Kind: kind,
		Internal: api.InternalOptions{Pointers: true}})
	if err != nil {
		return err
	}
	if all, ok := list.(*api.ObjectList); ok {
		for _, o := range all.Items {
			if o.GetAnnotations()[DefaultClassAnnotation] == "true" {
				delete(class.Annotations, DefaultClassAnnotation)
			}
		}
	}
	if err := s.writeObject(ctx, fence, api.VerbCreate, class); err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	next := system.DeepCopy()
	metav1.SetMetaDataAnnotation(&next.ObjectMeta, storageClassGiven, localClass)
	return s.writeObject(ctx, fence, api.VerbUpdate, next)
}
