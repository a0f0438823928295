package framework

// Normalize scales the scores of a Score plugin in place, so that the highest becomes MaxScore. If
// reverse is true, low scores are better: 0 becomes MaxScore, and the highest score becomes 0.
func Normalize(scores []int64, reverse bool) {
	var most int64
	for _, s := range scores {
		most = max(most, s)
	}
	for i, s := range scores {
		switch {
		case most == 0 && reverse:
			scores[i] = MaxScore
		case most == 0:
			scores[i] = 0
		case reverse:
			scores[i] = MaxScore - s*MaxScore/most
		default:
			scores[i] = s * MaxScore / most
		}
	}
}
