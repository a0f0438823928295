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
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/csi"
	"keelson.dev/keelson/internal/saturate"
)

// csiSource is a CSI volume as requested by a pod, through a PersistentVolume or inline.
type csiSource struct {
	// name is the name of the PersistentVolume, or of the inline volume in its pod. Folders have
	// this name.
	name           string
	driver, handle string
	inline         bool
	block          bool
	readonly       bool
	fsType         string
	options        []string
	accessModes    []v1.PersistentVolumeAccessMode
	attributes     map[string]string

	stageSecret, publishSecret, expandSecret *v1.SecretReference

	size           int64 // capacity of the PersistentVolume in bytes
	needsExpansion bool  // the volume was expanded, but not yet on the node
}

// String returns the volume's name for messages.
func (s csiSource) String() string {
	if s.inline {
		return fmt.Sprintf("inline volume %q", s.name)
	}
	return fmt.Sprintf("persistentvolume %q", s.name)
}

// persistentSource returns the csiSource of a CSI PersistentVolume. claim is its claim, and
// readonly states whether the pod uses it read-only.
func persistentSource(pv *v1.PersistentVolume, claim *v1.PersistentVolumeClaim, readonly bool) csiSource {
	c := pv.Spec.CSI
	return csiSource{name: pv.Name, driver: c.Driver, handle: c.VolumeHandle, block: isBlock(pv),
		readonly: readonly || c.ReadOnly,
		fsType:   c.FSType, options: pv.Spec.MountOptions, accessModes: pv.Spec.AccessModes,
		attributes:  c.VolumeAttributes,
		stageSecret: c.NodeStageSecretRef, publishSecret: c.NodePublishSecretRef, expandSecret: c.NodeExpandSecretRef,
		size: saturate.Value(pv.Spec.Capacity.Storage()), needsExpansion: needsNodeExpansion(pv, claim)}
}

// inlineSource returns the csiSource of an inline (ephemeral) CSI volume of a pod. Publishing
// creates such a volume, and unpublishing deletes it.
func inlineSource(pod *v1.Pod, vol *v1.Volume) csiSource {
	c := vol.CSI
	s := csiSource{name: vol.Name, driver: c.Driver, inline: true,
		accessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce},
		handle:      fmt.Sprintf("csi-%x", sha256.Sum256([]byte(string(pod.UID)+vol.Name))),
		attributes:  c.VolumeAttributes}
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

// checkLifecycleMode returns an error if the driver does not support the lifecycle mode of the
// volume: Ephemeral for an inline volume, otherwise Persistent. about is nil if the driver has no
// CSIDriver object.
func (s csiSource) checkLifecycleMode(about *storagev1.CSIDriver) error {
	mode, modes := storagev1.VolumeLifecyclePersistent,
		[]storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent}
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
		return fmt.Errorf("CSI driver %s does not declare support for inline volumes: there is no CSIDriver object "+
			"with its name and with %s in spec.volumeLifecycleModes", s.driver, mode)
	}
	return fmt.Errorf("CSI driver %s does not support this volume: its CSIDriver object has %q in "+
		"spec.volumeLifecycleModes, but the volume needs %s",
		s.driver, modes, mode)
}

// driverVolume returns the description of the volume that is passed to the driver. addPodInfo adds
// the information about the pod.
func (v *csiVolumes) driverVolume(pod *v1.Pod, s csiSource, r csiRecord) (csi.Volume, error) {
	cv := csi.Volume{ID: r.Volume, StagingPath: r.Staging, TargetPath: r.Target, Block: s.block, FSType: s.fsType,
		MountFlags: s.options, ReadOnly: s.readonly, FSGroup: fsGroup(pod), VolumeContext: map[string]string{}}
	maps.Copy(cv.VolumeContext, s.attributes)
	if s.inline {
		cv.StagingPath = ""
	} else if a, ok := v.cfg.Objects.VolumeAttachment(s.driver, s.handle); ok {
		cv.PublishContext = a.Status.AttachmentMetadata
	}
	if len(s.accessModes) > 0 {
		cv.AccessMode = string(s.accessModes[0])
	}
	var err error
	if cv.StageSecrets, err = readSecret(v.cfg.Objects, s.stageSecret); err != nil {
		return cv, err
	}
	cv.PublishSecrets, err = readSecret(v.cfg.Objects, s.publishSecret)
	return cv, err
}

// addPodInfo adds to cv the information about the pod that the driver requests for publishing. That
// is the pod's identity (podInfoOnMount) and tokens of its service account (tokenRequests).
func (v *csiVolumes) addPodInfo(
	ctx context.Context, cv *csi.Volume, pod *v1.Pod, about *storagev1.CSIDriver, inline bool,
) error {
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
		seconds := ptr.Deref(want.ExpirationSeconds, int64(3600))
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

func readSecret(objects agent.Objects, ref *v1.SecretReference) (map[string]string, error) {
	if ref == nil {
		return nil, nil
	}
	s, ok := objects.Secret(ref.Namespace, ref.Name)
	if !ok {
		return nil, fmt.Errorf("secret \"%s/%s\" not found", ref.Namespace, ref.Name)
	}
	out := map[string]string{}
	for k, b := range s.Data {
		out[k] = string(b)
	}
	return out, nil
}

// needsGroup reports whether the pod's fsGroup must be applied to the files of the volume,
// according to the driver's fsGroupPolicy. By default it is applied to ReadWriteOnce volumes with
// an fsType.
func needsGroup(about *storagev1.CSIDriver, s csiSource) bool {
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
		return s.fsType != "" && slices.Contains(s.accessModes, v1.ReadWriteOnce)
	}
}
