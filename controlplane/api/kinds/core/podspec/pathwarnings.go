package podspec

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// volumePath is the path of a file in a volume and the source that writes it ("" if the volume has
// one source).
type volumePath struct{ path, source string }

func (p volumePath) String() string {
	if p.source == "" {
		return fmt.Sprintf("%q", p.path)
	}
	return fmt.Sprintf("%q (%s)", p.path, p.source)
}

// overlaps reports whether two paths are equal or one contains the other.
func (p volumePath) overlaps(o volumePath) bool {
	return p == o || strings.HasPrefix(o.path+"/", p.path+"/") || strings.HasPrefix(p.path+"/", o.path+"/")
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

// projectedPaths returns the paths that a source of a projected volume names.
func projectedPaths(s *corev1.VolumeProjection) (out []volumePath) {
	switch {
	case s.ConfigMap != nil && s.ConfigMap.Items != nil:
		return itemPaths(s.ConfigMap.Items, fmt.Sprintf("ConfigMap %q", s.ConfigMap.Name))
	case s.Secret != nil && s.Secret.Items != nil:
		return itemPaths(s.Secret.Items, fmt.Sprintf("Secret %q", s.Secret.Name))
	case s.DownwardAPI != nil && s.DownwardAPI.Items != nil:
		return downwardPaths(s.DownwardAPI.Items, "DownwardAPI")
	case s.ServiceAccountToken != nil:
		return []volumePath{{s.ServiceAccountToken.Path, "ServiceAccountToken"}}
	case s.ClusterTrustBundle != nil:
		name := fieldrules.Deref(s.ClusterTrustBundle.SignerName)
		if s.ClusterTrustBundle.Name != nil {
			name = *s.ClusterTrustBundle.Name
		}
		return []volumePath{{s.ClusterTrustBundle.Path, fmt.Sprintf("ClusterTrustBundle %q", name)}}
	case s.PodCertificate != nil:
		for _, p := range []volumePath{{s.PodCertificate.CertificateChainPath, "PodCertificate chain"},
			{s.PodCertificate.KeyPath, "PodCertificate key"}, {s.PodCertificate.CredentialBundlePath, "PodCertificate credential bundle"}} {
			if p.path != "" {
				out = append(out, p)
			}
		}
	}
	return out
}

// overlappingPaths returns warnings about volumes in which one file replaces another.
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
						out = append(out, fmt.Sprintf("volume %q (%s): overlapping paths: %s with %s", v.Name, kind, p, o))
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
