package volume

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"keelson.dev/keelson/csi"
	"keelson.dev/keelson/internal/saturate"
)

// source is a volume of a CSI driver as a pod asks for it: that of a PersistentVolume, or one that the pod has for itself.
type source struct {
	// name is the PersistentVolume's, or the name of an inline volume in its pod. Folders are named after it.
	name           string
	driver, handle string
	inline         bool
	block          bool
	readonly       bool
	fsType         string
	options        []string
	modes          []v1.PersistentVolumeAccessMode
	attributes     map[string]string

	stageSecret, publishSecret, expandSecret *v1.SecretReference

	size    int64 // of a PersistentVolume, in bytes
	growing bool  // it has become larger than what its claim was told that it has
}

// String names the volume for messages.
func (s source) String() string {
	if s.inline {
		return fmt.Sprintf("inline volume %q", s.name)
	}
	return fmt.Sprintf("persistentvolume %q", s.name)
}

// persistent is the volume behind a claim.
func persistent(pv *v1.PersistentVolume, claim *v1.PersistentVolumeClaim, readonly bool) source {
	c := pv.Spec.CSI
	return source{name: pv.Name, driver: c.Driver, handle: c.VolumeHandle, block: isBlock(pv), readonly: readonly || c.ReadOnly,
		fsType: c.FSType, options: pv.Spec.MountOptions, modes: pv.Spec.AccessModes, attributes: c.VolumeAttributes,
		stageSecret: c.NodeStageSecretRef, publishSecret: c.NodePublishSecretRef, expandSecret: c.NodeExpandSecretRef,
		size: saturate.Value(pv.Spec.Capacity.Storage()), growing: growsOnNode(pv, claim)}
}

// inline is a volume that a pod has for itself, which is made when it is published and gone when it is unpublished.
func inline(pod *v1.Pod, vol *v1.Volume) source {
	c := vol.CSI
	s := source{name: vol.Name, driver: c.Driver, inline: true, modes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce},
		handle:     fmt.Sprintf("csi-%x", sha256.Sum256([]byte(string(pod.UID)+vol.Name))),
		attributes: c.VolumeAttributes}
	if c.ReadOnly != nil {
		s.readonly = *c.ReadOnly
	}
	if c.FSType != nil {
		s.fsType = *c.FSType
	}
	if c.NodePublishSecretRef != nil {
		s.publishSecret = &v1.SecretReference{Namespace: pod.Namespace, Name: c.NodePublishSecretRef.Name}
	}
	return s
}

// allowedBy says why the driver, about which there may be no object, does not serve such volumes.
func (s source) allowedBy(about *storagev1.CSIDriver) error {
	mode, modes := storagev1.VolumeLifecyclePersistent, []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent}
	if s.inline {
		mode = storagev1.VolumeLifecycleEphemeral
	}
	if about != nil && len(about.Spec.VolumeLifecycleModes) > 0 {
		modes = about.Spec.VolumeLifecycleModes
	}
	switch {
	case slices.Contains(modes, mode):
		return nil
	case about == nil:
		return fmt.Errorf("CSI driver %s does not say that it serves volumes that pods have for themselves: there is no CSIDriver object "+
			"of its name with %s in spec.volumeLifecycleModes", s.driver, mode)
	}
	return fmt.Errorf("CSI driver %s does not serve volumes of this sort: its CSIDriver object has %q in spec.volumeLifecycleModes, and this takes %s",
		s.driver, modes, mode)
}

// describe puts together what the driver is told of the volume, for whichever pod.
func (v *Volumes) describe(pod *v1.Pod, s source, r record) (csi.Volume, error) {
	cv := csi.Volume{ID: r.Volume, StagingPath: r.Staging, TargetPath: r.Target, Block: s.block, FSType: s.fsType,
		MountFlags: s.options, ReadOnly: s.readonly, FSGroup: fsGroup(pod), VolumeContext: map[string]string{}}
	maps.Copy(cv.VolumeContext, s.attributes)
	if s.inline {
		cv.StagingPath = ""
	} else if a, ok := v.cfg.Objects.VolumeAttachment(s.driver, s.handle); ok {
		cv.PublishContext = a.Status.AttachmentMetadata
	}
	if len(s.modes) > 0 {
		cv.AccessMode = string(s.modes[0])
	}
	var err error
	if cv.StageSecrets, err = v.driverSecret(s.stageSecret); err != nil {
		return cv, err
	}
	cv.PublishSecrets, err = v.driverSecret(s.publishSecret)
	return cv, err
}

// addressedTo adds what a driver asks to be told of the pod when a volume is published for it: who the pod is
// (podInfoOnMount), and tokens of its service account (tokenRequests).
func (v *Volumes) addressedTo(ctx context.Context, cv *csi.Volume, pod *v1.Pod, about *storagev1.CSIDriver, inline bool) error {
	if about == nil {
		return nil
	}
	cv.VolumeContext = maps.Clone(cv.VolumeContext)
	if p := about.Spec.PodInfoOnMount; p != nil && *p {
		cv.VolumeContext["csi.storage.k8s.io/pod.name"] = pod.Name
		cv.VolumeContext["csi.storage.k8s.io/pod.namespace"] = pod.Namespace
		cv.VolumeContext["csi.storage.k8s.io/pod.uid"] = string(pod.UID)
		cv.VolumeContext["csi.storage.k8s.io/serviceAccount.name"] = pod.Spec.ServiceAccountName
		cv.VolumeContext["csi.storage.k8s.io/ephemeral"] = strconv.FormatBool(inline)
	}
	if len(about.Spec.TokenRequests) == 0 {
		return nil
	}
	type token struct {
		Token   string    `json:"token"`
		Expires time.Time `json:"expirationTimestamp"`
	}
	tokens := map[string]token{}
	for _, want := range about.Spec.TokenRequests {
		seconds := int64(3600)
		if want.ExpirationSeconds != nil {
			seconds = *want.ExpirationSeconds
		}
		text, expires, err := v.cfg.Objects.Token(ctx, pod, want.Audience, seconds)
		if err != nil {
			return fmt.Errorf("a token of service account %s/%s for CSI driver %s: %w", pod.Namespace,
				pod.Spec.ServiceAccountName, about.Name, err)
		}
		tokens[want.Audience] = token{text, expires.UTC()}
	}
	data, err := json.Marshal(tokens)
	if err != nil {
		return err
	}
	const name = "csi.storage.k8s.io/serviceAccount.tokens"
	if in := about.Spec.ServiceAccountTokenInSecrets; in != nil && *in {
		cv.PublishSecrets = maps.Clone(cv.PublishSecrets)
		if cv.PublishSecrets == nil {
			cv.PublishSecrets = map[string]string{}
		}
		cv.PublishSecrets[name] = string(data)
		return nil
	}
	cv.VolumeContext[name] = string(data)
	return nil
}

func (v *Volumes) driverSecret(ref *v1.SecretReference) (map[string]string, error) {
	if ref == nil {
		return nil, nil
	}
	s, ok := v.cfg.Objects.Secret(ref.Namespace, ref.Name)
	if !ok {
		return nil, fmt.Errorf("secret \"%s/%s\" not found", ref.Namespace, ref.Name)
	}
	out := map[string]string{}
	for k, b := range s.Data {
		out[k] = string(b)
	}
	return out, nil
}

// groupWanted follows fsGroupPolicy; by default a group is applied to volumes with a file system for one node.
func groupWanted(about *storagev1.CSIDriver, s source) bool {
	policy := storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy
	if about != nil && about.Spec.FSGroupPolicy != nil {
		policy = *about.Spec.FSGroupPolicy
	}
	switch policy {
	case storagev1.NoneFSGroupPolicy:
		return false
	case storagev1.FileFSGroupPolicy:
		return true
	default:
		return s.fsType != "" && slices.Contains(s.modes, v1.ReadWriteOnce)
	}
}
