package podspec

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// volumePath is the path of a file in a volume, and the source of the projected volume that writes
// the file. The source is "" in other volumes.
type volumePath struct{ path, source string }

func (p volumePath) String() string {
	if p.source == "" {
		return fmt.Sprintf("%q", p.path)
	}
	return fmt.Sprintf("%q (%s)", p.path, p.source)
}

// overlaps reports whether two paths are equal or one is a parent folder of the other.
func (p volumePath) overlaps(other volumePath) bool {
	return p == other || strings.HasPrefix(other.path+"/", p.path+"/") || strings.HasPrefix(p.path+"/", other.path+"/")
}

func itemPaths(items []corev1.KeyToPath, source string) (out []volumePath) {
	for _, i := range items {
		out = append(out, volumePath{i.Path, source})
	}
	return out
}

func downwardPaths(items []corev1.DownwardAPIVolumeFile, source string) (out []volumePath) {
	for _, i := range items {
		out = append(out, volumePath{i.Path, source})
	}
	return out
}

// projectedPaths returns the paths that a source of a projected volume specifies.
func projectedPaths(source *corev1.VolumeProjection) (out []volumePath) {
	switch {
	case source.ConfigMap != nil && source.ConfigMap.Items != nil:
		return itemPaths(source.ConfigMap.Items, fmt.Sprintf("ConfigMap %q", source.ConfigMap.Name))
	case source.Secret != nil && source.Secret.Items != nil:
		return itemPaths(source.Secret.Items, fmt.Sprintf("Secret %q", source.Secret.Name))
	case source.DownwardAPI != nil && source.DownwardAPI.Items != nil:
		return downwardPaths(source.DownwardAPI.Items, "DownwardAPI")
	case source.ServiceAccountToken != nil:
		return []volumePath{{source.ServiceAccountToken.Path, "ServiceAccountToken"}}
	case source.ClusterTrustBundle != nil:
		name := ptr.Deref(source.ClusterTrustBundle.SignerName, "")
		if source.ClusterTrustBundle.Name != nil {
			name = *source.ClusterTrustBundle.Name
		}
		return []volumePath{{source.ClusterTrustBundle.Path, fmt.Sprintf("ClusterTrustBundle %q", name)}}
	case source.PodCertificate != nil:
		for _, p := range []volumePath{{source.PodCertificate.CertificateChainPath, "PodCertificate chain"},
			{source.PodCertificate.KeyPath, "PodCertificate key"},
			{source.PodCertificate.CredentialBundlePath, "PodCertificate credential bundle"}} {
			if p.path != "" {
				out = append(out, p)
			}
		}
	}
	return out
}

// overlappingPaths returns warnings about volumes in which one file overwrites another.
func overlappingPaths(volumes []corev1.Volume) []string {
	var out []string
	for i := range volumes {
		v := &volumes[i]
		collide := func(kind string, paths []volumePath) {
			var before []volumePath
			for _, p := range paths {
				p.path = strings.TrimRight(p.path, "/")
				for _, o := range before {
					if p.path != "" && o.path != "" && p.overlaps(o) {
						out = append(out, fmt.Sprintf("volume %q (%s): overlapping paths: %s with %s",
							v.Name, kind, p, o))
					}
				}
				before = append(before, p)
			}
		}
		switch {
		case v.ConfigMap != nil:
			collide(fmt.Sprintf("ConfigMap %q", v.ConfigMap.Name), itemPaths(v.ConfigMap.Items, ""))
		case v.Secret != nil:
			collide(fmt.Sprintf("Secret %q", v.Secret.SecretName), itemPaths(v.Secret.Items, ""))
		case v.DownwardAPI != nil:
			collide("DownwardAPI", downwardPaths(v.DownwardAPI.Items, ""))
		case v.Projected != nil:
			var all []volumePath
			for j := range v.Projected.Sources {
				if v.Projected.Sources[j] == (corev1.VolumeProjection{}) {
					out = append(out, fmt.Sprintf("volume %q (Projected) has no sources provided", v.Name))
				}
				all = append(all, projectedPaths(&v.Projected.Sources[j])...)
			}
			collide("Projected", all)
		}
	}
	return out
}
