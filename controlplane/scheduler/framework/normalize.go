package framework

// Normalize scales the scores so that the highest becomes MaxScore. If reverse is set, the lowest
// score becomes the best.
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
