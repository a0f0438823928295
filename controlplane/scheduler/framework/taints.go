package framework

import v1 "k8s.io/api/core/v1"

// Tolerated reports whether one of the tolerations tolerates the taint.
func Tolerated(tolerations []v1.Toleration, taint *v1.Taint) bool {
	for i := range tolerations {
		t := &tolerations[i]
		if t.Effect != "" && t.Effect != taint.Effect {
			continue
		}
		switch t.Operator {
		case v1.TolerationOpExists:
			if t.Key == "" || t.Key == taint.Key {
				return true
			}
		case "", v1.TolerationOpEqual:
			if t.Key == taint.Key && t.Value == taint.Value {
				return true
			}
		}
	}
	return false
}
